"""Store what transformers computes with all-MiniLM-L6-v2 in float64: token ids and vectors of a few texts.

    python tools/make_minilm_oracle.py FOLDER tests/oracles/minilm_vectors.json.gz      (needs transformers)

FOLDER: where `m3jit model get minilm` put the model. Vectors are means over tokens, of length 1.
"""
from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

TEXTS = [
    "guitar", "instrument", "A man plays a wooden instrument with six strings.", "Someone is playing the guitar.",
    "The parliament adopted the budget on Tuesday.", "naïve Café, ÅNGSTRÖM & 東京タワー 3.1415!", "",
    " ".join(["river"] * 300),
]


def main(folder: str, output: str) -> None:
    model = AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            vector = model(torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
        rows.append({"text": text, "ids": ids, "vector": [round(v, 7) for v in (vector / vector.norm()).tolist()]})
    Path(output).write_bytes(gzip.compress(json.dumps(rows).encode(), mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
