"""Text from a language model inside a Python program: tokens as they come, and two continuations of one prompt.

    python examples/generate.py [model file or name] [prompt]
"""
import sys

import m3jit

reference = sys.argv[1] if len(sys.argv) > 1 else "default"
prompt = sys.argv[2] if len(sys.argv) > 2 else "The carriage stopped at the door, and"

model = m3jit.load_model(reference)

for seed in (1, 2):
    generation = model.generate(prompt, max_tokens=24, seed=seed)
    print(prompt, end="")
    for piece in generation:
        print(piece.text, end="", flush=True)
    print(f"   [{generation.usage.completion_tokens} tokens, seed {seed}]")
