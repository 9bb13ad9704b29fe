"""Digest of a model folder that differs between weights, configs and tokenizers."""

from pathlib import Path

import xxhash

PARTS, PART_BYTES = 16, 2**16  # number and size of the samples read from each file
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
    """Return a digest of a model's files: small files in full, large files by size and 16 samples of 64 KiB.

    A training step that changes all weights changes the digest; a change to a single tensor may go unnoticed.
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
