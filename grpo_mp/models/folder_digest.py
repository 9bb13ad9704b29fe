"""A digest that differs where a model's folder holds other weights, another config or another tokenizer."""

from pathlib import Path

import xxhash

PARTS, PART_BYTES = 16, 2**16  # of each file that are read
MODEL_FILES = (
    "*.safetensors",
    "**/*.distcp",
    "**/rank_*.bin",
    "config.json",
    "tokenizer*.json",
    "chat_template.jinja",
    "manifest.json",
)


def model_digest(folder: Path) -> str:
    """Return a digest of a model's files: small files whole, of large ones the size and 16 samples of 64 KiB.

    It differs where training has changed all weights; a change to a single tensor may go unnoticed.
    """
    digest = xxhash.xxh3_128()
    for file in sorted({file for pattern in MODEL_FILES for file in folder.glob(pattern) if file.is_file()}):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)} {size} ".encode())
        last = max(0, size - PART_BYTES)
        with file.open("rb") as stream:
            for start in sorted({last * part // (PARTS - 1) for part in range(PARTS)}):
                stream.seek(start)
                digest.update(stream.read(PART_BYTES))
    return digest.hexdigest()
