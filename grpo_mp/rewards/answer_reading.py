r"""Parse boxed answers into numbers, texts, or expressions for math-verify.

A text with two readings (`4 5`, `5 \text{ million}`, `10:30`) is not a number; it equals only the same text.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from unicodedata import normalize

# Abbreviations of units that need no blank before them; other units are words of three letters or more.
_SYMBOLS = """
    mm cm dm km in ft yd mi mg kg gm oz lb lbs ms sec hr hrs ml mph sq cu deg rad st nd rd th
"""
SYMBOLS = frozenset(_SYMBOLS.split())
LETTERS = frozenset("msghldACDFGHJKLMNPSTVW")  # single letters that are units inside of \text{}

# Words after a number that are not units: scales, signs, relations, months, days, am and pm.
_NOT_UNITS = """
    hundred thousand million billion trillion quadrillion dozen gross score myriad mil mn bn half halves quarter
    third fourth fifth sixth seventh eighth ninth tenth hundredth thousandth millionth lakh crore double triple
    squared cubed factorial power root zero one two three four five six seven eight nine ten eleven twelve twenty thirty
    forty fifty sixty seventy eighty ninety point minus plus negative positive less more fewer greater than
    least most over under above below between from to until through by and or not except remainder rem mod
    modulo base am pm noon midnight bc ad bce ce january february march april may june july august september
    october november december jan feb mar apr jun jul aug sep sept oct nov dec monday tuesday wednesday thursday
    friday saturday sunday
"""
NOT_UNITS = frozenset(_NOT_UNITS.split())

# Names of functions and constants, words for percent, and conjunctions: they are not prose.
_MATH_NAMES = """
    pi infinity infty inf sqrt frac sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp
    min max gcd lcm det mod lim sup dim ker alpha beta gamma theta lambda phi percent percentage pct and or
"""
MATH_NAMES = frozenset(_MATH_NAMES.split())

# Limits of a number: Python converts integers of at most 4300 digits
MAX_CHARACTERS = 1000
MAX_EXPONENT = 3000

MAX_PLACES = 64  # decimal places of a number for math-verify
TOLERANCE = Fraction(1, 100)  # for expected numbers that are not integers

TEXT_COMMAND = re.compile(r"\\(?:text(?:rm|bf|it|sf|tt|sc|normal)?|math(?:rm|bf|sf|it)|mbox|hbox|boldsymbol|rm|bf) ?\{")
BLANKS = re.compile(r"(?:(?<!\\)\\(?:[ ,;:]|quad(?![a-z])|qquad(?![a-z])|thinspace(?![a-z]))|[\s~])+")
SPELLINGS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:displaystyle|textstyle)(?![a-zA-Z])|\\!", ""),
        (r"\{ ?, ?\}", ","),
        (r"\{ ?\\(?:rm|bf|it) ([^{}]*)\}", r"\\text{\1}"),
        (r"\\text\{ *\}", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (r"\\frac ?([0-9]) ?([0-9])", r"\\frac{\1}{\2}"),
        (r"(?<!\\)\\([%$#&])", r"\1"),
        (r"\^ ?\{? ?(\\text\{ ?(?:st|nd|rd|th) ?\}) ?\}?", r" \1"),
        (r"\bper cent\b", "percent"),
        (r"\b([ap])\.? ?m\.", r"\1m"),
        ("[\u2212\ufe63\uff0d]|^[\u2013\u2014](?=[ 0-9.])", "-"),
        (r"\^ ?(?:\{ ?\\circ ?\}|\\circ)|\\(?:text)?degree(?![a-zA-Z])", "\u00b0"),
        ("\u00d7", r"\\times "),
        ("\u03c0", r"\\pi "),
        ("\u221e", r"\\infty "),
        (r"_ ?([0-9]+) (?=[0-9])", r"_{\1} "),
        (r"^(?:\\approx|\u2248|=) ?", ""),
    )
)
# Full-width characters, the ideographic full stop, and the ordinal sign, which some write for degrees.
IN_ASCII = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | {0x3002: ".", 0xBA: "\u00b0"}
VULGAR_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e]")  # such as one half
SUPERSCRIPT = re.compile("[\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
SUPERSCRIPT_DIGITS = str.maketrans(
    "\u207a\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", "+-0123456789"
)
DELIMITERS = ("$$ $$", "$ $", r"\( \)", r"\[ \]", "{ }", "** **", "` `", "' '", '" "', "\u201c \u201d")
TEXT = re.compile(r"\\text\{([^{}]*)\}")

INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9])|[0-9]+)"
DECIMAL = rf"(?:{INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
OPERAND = rf"[-+]? ?{DECIMAL}"
LATEX_FRACTION = rf"\\frac ?(?:\{{ ?({OPERAND}) ?\}}|([0-9])) ?(?:\{{ ?({OPERAND}) ?\}}|([0-9]))"
CURRENCY = r"(?:US|A|C|HK)?\$|[\u20ac\u00a3\u00a5\u20b9]|Rs\.?|USD|EUR|GBP|INR"
START = re.compile(rf"([-+]?) ?(?:(?:\\text\{{ ?)?({CURRENCY})(?: ?\}})? ?([-+]?) ?)?")
REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\overline ?\{([0-9]+)\}")
MIXED = re.compile(rf"({INTEGER}) ?{LATEX_FRACTION}")
MIXED_PLAIN = re.compile(r"([0-9]+) ([1-9][0-9]*) ?/ ?([0-9]+)")
FRACTION = re.compile(LATEX_FRACTION)
SLASH = re.compile(rf"({DECIMAL}) ?/ ?({OPERAND})")
SCIENTIFIC = re.compile(
    rf"(?:({DECIMAL}) ?(?:\\times|\\cdot|\*|x) ?)?10 ?(?:\^|\*\*) ?"
    r"(?:\{ ?([-+]?[0-9]+) ?\}|\(([-+]?[0-9]+)\)|([-+]?[0-9]+))"
)
E_NOTATION = re.compile(rf"({DECIMAL})[eE]([-+]?[0-9]+)")
PLAIN = re.compile(DECIMAL)

UNIT_PART = re.compile(
    r"\\text\{(?P<text>[^{}]*)\}|(?P<word>m/s|[A-Za-z]+)\.?|(?P<sign>[%$\u00b0\u20ac\u00a3\u00a5\u20b9\u00a2])"
    r"|(?<=[A-Za-z}\u00b0)]) ?\^ ?(?:\{ ?-?[1-9] ?\}|-?[1-9])|/|\\cdot(?![a-zA-Z])"
    r"|\\(?:mu|Omega|AA|ell)(?![a-zA-Z])| |\((?=[a-zA-Z\\])|(?<=[a-zA-Z}])\)"
)
UNIT_TEXT = re.compile(r"(?:[A-Za-z]+(?:['\u2019][a-z]+)?|[ /().,%\u00b0\u00b5\u03a9\u00c5-]|\^-?[1-9]|\^\{-?[1-9]\})*")
WORD = re.compile(r"[A-Za-z]+(?:['\u2019][a-z]+)?|[%\u00b0]")
MAGNITUDE = re.compile(r"\\text\{[KMBT]\}")  # directly after the digits: 5M is five million

CLOCK = re.compile(r"([0-9]{1,2})(?::([0-9]{2}))?(?::([0-9]{2}))?(?: ?([ap])\.? ?m\.?)?", re.IGNORECASE)
DATE = re.compile(r"[0-9]{1,4}([-/])[0-9]{1,2}\1[0-9]{1,4}")
BASED = re.compile(r"\(?([0-9A-Z]+)\)? ?_ ?\{? ?(?:\\text\{)? ?([0-9]+) ?\}{0,2}")
LETTER = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer):? )?(?:\(([A-Z])\)|([A-Za-z])[.):]?)")
LABEL_AS_TEXT = re.compile(r"^\\text\{ ?(\([A-J]\)|[A-J][.:]) ?\} ?")
LABELLED = re.compile(r"(?:\(([A-J])\)|([A-J])[.):]) (\S.*)")
RATIO = re.compile(r"[0-9.]+(?: ?: ?[0-9.]+){2,}")
NAMED = re.compile(
    r"(?:[A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))?|\\text\{[^{}]*\}|\\(?!frac|sqrt)[a-z]+) ?(?:=|\\approx) ?([^=]+)"
)
UNITS_BEHIND = re.compile(r"(?: ?\\text\{[^{}]*\}(?: ?\^ ?(?:\{-?[1-9]\}|[1-9]))?)+$")
WORD_BESIDE_NUMBER = re.compile(r"[0-9}] ([A-Za-z]{2,})|(?<![\\A-Za-z])([A-Za-z]{2,}) [0-9\\]")
OUTSIDE_MATHEMATICS = re.compile(  # adjacent digits, feet and inches, a relation without its left side
    r"[0-9] [0-9]|[0-9] ?['\"\u2032\u2033]|^(?:[<>]|\\(?:le|ge|leq|geq|lt|gt|ne|neq|leqslant|geqslant)(?![a-z]))"
)
TIGHT_EXPONENT = re.compile(rf"(?<![A-Za-z0-9.])({DECIMAL})[eE](\+?[0-9]+|-[0-9]{{2,}})(?![0-9A-Za-z.])")


@dataclass(frozen=True)
class Number:
    """A number in an answer; its unit is dropped."""

    value: Fraction
    is_decimal: bool  # written with a decimal point, so it may be rounded
    is_percent: bool = False

    @property
    def share(self) -> Fraction:
        return self.value / 100 if self.is_percent else self.value

    @property
    def latex(self) -> str:
        """The number in LaTeX for math-verify."""
        sign = "-" * (self.value < 0)
        value = abs(self.value)
        digits = _decimal_digits(value) if self.is_decimal else None
        fraction = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
        number = digits or (fraction if value.denominator > 1 else str(value.numerator))
        return sign + number + r"\%" * self.is_percent


@dataclass(frozen=True)
class Text:
    """An answer that equals only the same text."""

    key: str
    latex: str | None = None  # of bare letters, which are a product of variables when compared with an expression
    digits: str | None = None  # of a number with its base (`101_2`): the other answer may leave the base out


@dataclass(frozen=True)
class Expression:
    """An answer for math-verify, without its unit."""

    latex: str


def read_answer(answer: str) -> Number | Text | Expression:
    """Parse the content of a box into a number, a text or an expression."""
    text = tidy(answer)
    wrapped = TEXT.fullmatch(text)
    body = _without_period(wrapped[1].strip()) if wrapped else text
    return read_number(body) or _read_text(body, bool(wrapped)) or _read_expression(body)


def tidy(answer: str) -> str:
    """Normalize an answer: LaTeX and Unicode spell blanks, fractions and signs in many ways, the result in one way."""
    text = SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(SUPERSCRIPT_DIGITS)}}}", answer.translate(IN_ASCII))
    text = VULGAR_FRACTION.sub(lambda match: " " + normalize("NFKC", match[0]).replace("\u2044", "/"), text)
    text = BLANKS.sub(" ", TEXT_COMMAND.sub(r"\\text{", text)).strip()
    before = None
    while text != before:
        before = text
        text = _without_delimiters(_without_period(text))
    for pattern, replacement in SPELLINGS:
        text = pattern.sub(replacement, text)
    return BLANKS.sub(" ", text).strip()


def split_label(answer: str) -> tuple[str | None, str]:
    """Split a multiple-choice answer into its letter and its text: `(B) 12` gives B and 12.

    An answer without a letter gives None and the answer itself.
    """
    match = LABELLED.fullmatch(LABEL_AS_TEXT.sub(r"\1 ", tidy(answer)))
    return (match[1] or match[2], match[3]) if match else (None, answer)


def without_name(answer: str) -> str:
    """Return the right side of an equation such as `x = 5` or `f(x) = x + 1`; any other answer unchanged."""
    match = NAMED.fullmatch(tidy(answer))
    return match[1] if match else answer


def is_close(expected: Fraction, predicted: Fraction) -> bool:
    """Return whether the difference is at most TOLERANCE * min(1, |expected|), or 0 if an integer is expected.

    So 0.005 is not close to 0.
    """
    allowed = TOLERANCE * min(Fraction(1), abs(expected)) if expected.denominator > 1 else 0
    return abs(expected - predicted) <= allowed


def same_number(expected: Number, predicted: Number) -> bool:
    """Return whether two numbers are equal, or close if one is written as a decimal. 50% equals both 50 and 0.5."""
    pairs = [(expected.value, predicted.value)]
    if expected.is_percent != predicted.is_percent:
        pairs.append((expected.share, predicted.share))
    may_round = expected.is_decimal or predicted.is_decimal
    return any(a == b or (may_round and is_close(a, b)) for a, b in pairs)


def read_number(text: str) -> Number | None:
    """Parse a normalized text as a number; None for any other text and for a number with two readings."""
    if len(text) > MAX_CHARACTERS:
        return None
    start = START.match(text)
    assert start
    if start[1] and start[3]:  # two signs
        return None
    if (parsed := _read_digits(text[start.end() :])) is None:
        return None
    value, is_decimal, tail = parsed
    if (is_percent := _read_units(tail)) is None:
        return None
    return Number(-value if "-" in (start[1], start[3]) else value, is_decimal, is_percent)


def _read_digits(text: str) -> tuple[Fraction, bool, str] | None:
    """Return the unsigned number at the start of a text, whether it has a decimal point, and the remaining text."""
    value: Fraction | None
    if match := REPEATING.match(text):
        value = _repeating(*match.groups())
    elif match := MIXED.match(text):
        value = _mixed(match[1], *_operands(match, 2))
    elif match := MIXED_PLAIN.match(text):
        value = None if len(match[2]) == 3 else _mixed(*match.groups())  # 1 250/300 may be 1250/300
    elif match := FRACTION.match(text):
        value = _quotient(*_operands(match, 1))
    elif match := SLASH.match(text):
        value = _quotient(*match.groups())
    elif match := SCIENTIFIC.match(text):
        value = _power_of_ten(match[1] or "1", match[2] or match[3] or match[4])
    elif match := E_NOTATION.match(text):
        value = _power_of_ten(match[1], match[2])
    elif match := PLAIN.match(text):
        value = _decimal(match[0])
    else:
        return None
    return None if value is None else (value, "." in match[0] and match.re is not REPEATING, text[match.end() :])


def _operands(match: re.Match[str], first: int) -> tuple[str, str]:
    return match[first] or match[first + 1], match[first + 2] or match[first + 3]


def _decimal(digits: str) -> Fraction:
    return Fraction(re.sub("[, ]", "", digits))


def _quotient(numerator: str, denominator: str) -> Fraction | None:
    below = _decimal(denominator)
    return _decimal(numerator) / below if below else None


def _mixed(whole: str, numerator: str, denominator: str) -> Fraction | None:
    part = _quotient(numerator, denominator)
    is_proper = part is not None and 0 < part < 1 and part.denominator > 1
    return _decimal(whole) + part if part is not None and is_proper else None


def _repeating(whole: str, fixed: str, period: str) -> Fraction:
    part = Fraction(int(period), 10 ** len(period) - 1) / 10 ** len(fixed)
    return Fraction(f"{whole or 0}.{fixed or 0}") + part


def _power_of_ten(mantissa: str, exponent: str) -> Fraction | None:
    if len(exponent) > 5 or abs(int(exponent)) > MAX_EXPONENT:
        return None
    return _decimal(mantissa) * Fraction(10) ** int(exponent)


def _decimal_digits(value: Fraction) -> str | None:
    """Write a nonnegative number with a decimal point; None if it needs MAX_PLACES decimal places or more."""
    places = next((places for places in range(1, MAX_PLACES) if 10**places % value.denominator == 0), None)
    if places is None:
        return None
    digits = str(int(value * 10**places)).rjust(places + 1, "0")
    return f"{digits[:-places]}.{digits[-places:]}"


def _read_units(tail: str) -> bool | None:
    """Return whether the text after a number is a percentage; None if that text is more than a unit."""
    words = list[str]()
    position = 0
    if MAGNITUDE.match(tail):
        return None
    while position < len(tail):
        part = UNIT_PART.match(tail, position)
        if part is None:
            return None
        if part["text"] is not None:
            if not UNIT_TEXT.fullmatch(part["text"]):
                return None
            found = WORD.findall(part["text"])
            if not found and part["text"].strip():
                return None
            words += found
        elif part["word"]:
            if not _is_plain_unit(part["word"], tail[:position]):
                return None
            words.append(part["word"])
        elif part["sign"]:
            words.append(part["sign"])
        position = part.end()
    if any(_changes_number(word) for word in words) or (tail.strip() and not words):
        return None
    percents = [word for word in words if word.lower() in ("%", "percent", "percentage", "pct")]
    return len(percents) == 1 if len(percents) < 2 else None


def _is_plain_unit(word: str, before: str) -> bool:
    r"""Return whether a word outside of \text{} is a unit, not a variable or function. `before`: text before it."""
    if word.lower() in SYMBOLS or word == "m/s":
        return True
    if len(word) == 1:
        return before.endswith("\u00b0") or bool(re.search(r"[A-Za-z]/$", before)) or word == "a"
    if word.lower() in MATH_NAMES:
        return word.lower().startswith(("per", "pct"))
    return (len(word) > 2 or word == "of") and bool(re.search(r"[ /(]$", before))


def _changes_number(word: str) -> bool:
    """Return whether a word after a number is not a unit, such as `million`, `pm` or a variable."""
    name = word.lower()
    if len(word) == 1:
        return word.isalpha() and word not in LETTERS and word != "a"
    return name in NOT_UNITS or name.removesuffix("s") in NOT_UNITS


def _read_text(body: str, is_wrapped: bool) -> Text | None:
    """Return a Text for a letter, words, a time, a date, or digits with a base; None for any other answer."""
    plain = BLANKS.sub(" ", TEXT.sub(r"\1", body)).strip()
    if match := LETTER.fullmatch(plain):
        letter = match[1] or match[2]
        return Text(letter, latex=letter)
    if (match := CLOCK.fullmatch(plain)) and (match[2] or match[4]):
        hour, minute, second, half = (part or "" for part in match.groups())
        return Text(f"{int(hour)}:{minute or '00'}:{second or '00'}{half.lower()}")
    if DATE.fullmatch(plain) or RATIO.fullmatch(plain):
        return Text(plain.replace(" ", ""))
    if match := BASED.fullmatch(body):
        return Text(f"{match[1]}_{match[2]}", digits=match[1])
    words = re.findall(r"[A-Za-z]+", plain)
    if re.fullmatch(r"[A-Za-z\u2019' .,-]+", plain) and not all(word.lower() in MATH_NAMES for word in words):
        shortest = 2 if is_wrapped or plain != body else 3
        if any(len(word) >= shortest and word.lower() not in MATH_NAMES for word in words):
            return Text(plain.casefold(), latex=plain if len(words) == 1 and plain == body and not is_wrapped else None)
    return None


def _read_expression(body: str) -> Text | Expression:
    """Return an Expression, or a Text if the answer has words or adjacent digits that math-verify would misread."""
    text = re.sub(r"(?<![0-9])[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9])", lambda match: match[0].replace(" ", ""), body)
    behind = UNITS_BEHIND.search(text, max(0, len(text) - MAX_CHARACTERS))
    if behind and behind.start() and _read_units(behind[0]) is not None:
        text = text[: behind.start()].rstrip()
    text = TEXT.sub(lambda match: match[1].strip() if len(match[1].strip()) == 1 else match[0], text)
    prose = [words for words in TEXT.findall(text) if words.strip(" ,") not in ("and", "or", "")]
    plain = TEXT.sub(" , ", text)
    beside = [word for pair in WORD_BESIDE_NUMBER.findall(plain) for word in pair if word]
    is_formula = re.search(r"[=+*/^_<>\\-]", plain)
    bare = () if is_formula else re.findall(r"[A-Za-z]{3,}", plain)
    words = {word.lower() for word in (*beside, *bare) if len(word) > 2 or word.lower() in NOT_UNITS} - MATH_NAMES
    if prose or words or OUTSIDE_MATHEMATICS.search(plain) or MIXED.fullmatch(plain):
        return Text(BLANKS.sub(" ", TEXT.sub(r"\1", body)).strip().casefold())
    return Expression(TIGHT_EXPONENT.sub(r"\1\\times 10^{\2}", text).replace("\u00b0", r"^\circ"))


def _without_delimiters(text: str) -> str:
    """Remove one pair of delimiters around the whole text: $5$, {5}."""
    for opening, closing in map(str.split, DELIMITERS):
        inside = text[len(opening) : -len(closing)]
        others = inside.replace(r"\$", "")
        if text == opening + inside + closing and opening not in others and closing not in others:
            return inside.strip()
    return text


def _without_period(text: str) -> str:
    return text if text.endswith("..") else re.sub(r"(?:\.|\\\\|\.(?=\}$))$", "", text).rstrip()
