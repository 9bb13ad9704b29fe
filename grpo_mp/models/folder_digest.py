"""A checksum that differs where a model's folder holds other weights, config or tokenizer."""

from pathlib import Path

import xxhash

PARTS, PART_BYTES = 16, 2**16  # of a file of weights that is read
MODEL_FILES = ("*.safetensors", "*.distcp", "config.json", "tokenizer*.json", "chat_template.jinja", "manifest.json")


def model_digest(folder: Path) -> str:
    """Return a checksum of a model's files: of small ones all, of weights the size and some parts at even distances.

    It differs where training has changed all weights; checkpoint/weights_digest.py sees a change of any tensor.
    """
    digest = xxhash.xxh3_128()
    for file in sorted({file for pattern in MODEL_FILES for file in folder.glob(pattern) if file.is_file()}):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        last = max(0, size - PART_BYTES)
        with file.open("rb") as stream:
            for start in sorted({last * part // (PARTS - 1) for part in range(PARTS)}):
                stream.seek(start)
                digest.update(stream.read(PART_BYTES))
    return digest.hexdigest()
