"""Text from a language model inside a Python program: tokens as they come, and two continuations of one prompt.

    python examples/generate.py [model file or name] [prompt]
"""
import sys

import m3jit
from m3jit.models.program import Options
from m3jit.models.provider import Models

reference = sys.argv[1] if len(sys.argv) > 1 else "default"
prompt = sys.argv[2] if len(sys.argv) > 2 else "The carriage stopped at the door, and"

models = Models()
model = models.load(reference)
program = models.program(model, reference, Options(max_tokens=24, temperature=0.8))

for seed in (1, 2):
    vm = m3jit.VM(program, models=models, seed=seed)
    vm.push_input(prompt)
    print(f"{prompt}", end="")
    for piece in vm.output():                           # runs the program as far as the next piece of text
        print(piece, end="", flush=True)
    print(f"   [{vm.get('rMade')} tokens, seed {seed}]")
