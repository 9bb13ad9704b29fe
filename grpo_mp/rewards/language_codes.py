"""Languages by ISO 639-1 code, and the scripts of language.py in which each is written."""

LATIN = (
    "cs",
    "da",
    "de",
    "en",
    "es",
    "fi",
    "fr",
    "hr",
    "hu",
    "id",
    "it",
    "ms",
    "nl",
    "no",
    "pl",
    "pt",
    "ro",
    "sk",
    "sl",
)
LANGUAGES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*LATIN, "sv", "sw", "tr", "vi"), ("latin",)),
    **dict.fromkeys(("be", "bg", "kk", "mk", "ru", "uk"), ("cyrillic",)),
    **dict.fromkeys(("ar", "fa", "ur"), ("arabic",)),
    **dict.fromkeys(("hi", "mr", "ne"), ("devanagari",)),
    "zh": ("cjk",),
    "ja": ("cjk", "hiragana", "katakana"),
    "ko": ("hangul",),
    "el": ("greek",),
    "he": ("hebrew",),
    "bn": ("bengali",),
    "ta": ("tamil",),
    "te": ("telugu",),
    "th": ("thai",),
    "ka": ("georgian",),
    "hy": ("armenian",),
}


def check_language(code: object) -> str:
    """Return the code. Raises ValueError where it is none, or its script is not known."""
    if not isinstance(code, str) or code not in LANGUAGES:
        raise ValueError(f"{code!r:.40} is no known language: {', '.join(sorted(LANGUAGES))}")
    return code
