"""Models as the machine's instructions see them: handles, the context's current model, tensors by name."""
from __future__ import annotations

from typing import Any

import numpy as np

from m3jit.errors import OperandError
from m3jit.isa.types import U8, Tensor
from m3jit.vm.commit import Store, attribute, item
from m3jit.vm.context import Context
from m3jit.vm.models import Model
from m3jit.vm.values import ContextRef, Handle


class ModelState:
    """A model as a state of a context."""
    __slots__ = ("model",)
    kind_name = "model"

    def __init__(self, model: Model):
        self.model = model


class ModelsView:
    """The part of `Machine` that loads models."""
    vm: Any
    ctx: Context
    stores: list[Store]
    _model_handles: dict[int, Handle]

    def load_model(self, reference: str, quant: str = "") -> Handle:
        """A new handle for a model; loading it again gives another handle of the same value."""
        state = ModelState(self.vm.load_model(reference, quant))
        handle, stores = self.handle_for(self.ctx, state)      # type: ignore[attr-defined]
        self.stores += stores
        return handle

    def unload_model(self, handle: Handle) -> None:
        self.model_of(handle)
        self.stores.append(item(*self.ctx.states.place(handle.id), None))
        if self.ctx.model == handle:
            self.stores.append(attribute(self.ctx, "model", None))

    def model_of(self, handle: Handle | None) -> Model:
        """The model of a handle; None: the context's current one."""
        handle = handle if handle is not None else self.ctx.model
        if handle is None:
            raise OperandError("no model: give a model handle, or set the context's with SET_MODEL")
        state = self.ctx.states.get(handle.id)
        if not isinstance(state, ModelState):
            raise OperandError(f"{handle.what} #{handle.id} is not a loaded model" if state is not None else
                               f"{handle.what} #{handle.id} does not exist here: it was unloaded, or loaded after the "
                               f"snapshot that was restored")
        return state.model

    def storing_handle_of(self, ctx: Context, model: Model) -> tuple[Handle, list[Store]]:
        """(the handle of a model that the program names with .model, the same one each time in a context; the stores
        that make it a state of the context)."""
        handle = self._model_handles.get(id(model))
        if handle is None:
            handle, stores = self.handle_for(ctx, ModelState(model))           # type: ignore[attr-defined]
            self._model_handles[id(model)] = handle    # Ctrl-C before the stores: it is the handle of the next time
            return handle, stores
        if ctx.states.get(handle.id) is not None:
            return handle, []
        return handle, [item(*ctx.states.place(handle.id), ModelState(model))]

    def set_model(self, handle: Handle, context: ContextRef | None) -> None:
        """Make a model the current one of a context (None: the running one)."""
        model = self.model_of(handle)
        target = self.ctx if context is None else self._live(context)
        if target is not self.ctx:
            self.stores.append(item(*target.states.place(handle.id), ModelState(model)))
        self.stores.append(attribute(target, "model", handle))

    def get_model(self, context: ContextRef | None) -> Handle:
        """The current model of a context, also as a state of the running one."""
        source = self.ctx if context is None else self._live(context)
        if source.model is None:
            raise OperandError(f"context {source.id} has no current model; SET_MODEL gives it one")
        if source is not self.ctx:
            self.stores.append(item(*self.ctx.states.place(source.model.id), source.states.get(source.model.id)))
        return source.model

    def _live(self, ref: ContextRef) -> Context:
        found = self.find_context(ref)                 # type: ignore[attr-defined]
        if found is None:
            raise OperandError(f"context {ref.id} has already ended")
        return found

    def compile_model(self, handle: Handle | None) -> Tensor:
        """A model as the bytes of a program."""
        raw = self.vm.models.compile(self.model_of(handle))
        return Tensor(U8, (len(raw),), np.frombuffer(raw, np.uint8))

    # -- constants of the program (image.ModelLookup) -----------------------------------------------------------------
    def model(self, name: str) -> Model:
        """The model a `.model` line named."""
        return self.vm.named_model(name)

    def tensor(self, name: str) -> Tensor:
        """`model:tensor`."""
        model, _, tensor = name.partition(":")
        try:
            return self.vm.named_model(model).tensor(tensor)
        except KeyError as e:
            hint = f" ({e.args[0]})" if e.args else ""
            raise OperandError(f"@{name}: the model has no such tensor{hint}") from None

    def model_info(self, handle: Handle | None, key: str) -> Any:
        """A fact about a model as a register value; text becomes its UTF-8 bytes."""
        model = self.model_of(handle)
        try:
            value = model.info(key)
        except KeyError as e:
            raise OperandError(f"{model.name} has no {key!r}" + (f" ({e.args[0]})" if e.args else "")) from None
        if isinstance(value, str):
            raw = value.encode("utf-8")
            return Tensor(U8, (len(raw),), np.frombuffer(raw, np.uint8))
        return value
