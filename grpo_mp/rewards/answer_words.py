"""Words in answers: units, what changes a number or names something, names of mathematics."""

# Measures by what they measure: two that differ, of one kind, make different answers. Other units are ignored.
MEASURES = {
    name: (kind, names.split()[0])
    for kind, several in {
        "length": "mm millimeter millimetre|cm centimeter centimetre|dm decimeter|m meter metre|km kilometer kilometre"
        "|in inch inches|ft foot feet|yd yard|mi mile",
        "mass": "mg milligram|g gram gm|kg kilogram kilo|ton tonne|oz ounce|lb lbs pound",
        "time": "ms millisecond|s sec second|min mins minute|h hr hrs hour|day|week|month|yr year",
        "volume": "ml milliliter millilitre|l L liter litre|gal gallon|pint|quart|cup",
        "money": "dollar $ usd|cent \u00a2|euro \u20ac eur|\u00a3 gbp|rupee \u20b9 rs inr|yen \u00a5",
        "angle": "degree \u00b0 deg|radian rad",
        "temperature": "C celsius|F fahrenheit|K kelvin",
        "change": "increase gain profit|decrease loss",
        "direction": "north|south|east|west|left|right|up|down",
        "order": "before early earlier ago|after late later",
    }.items()
    for names in several.split("|")
    for name in names.split()
}

# Abbreviations of units that need no blank before them; other units are words of three letters or more.
_SYMBOLS = """
    mm cm dm km in ft yd mi mg kg gm oz lb lbs ms sec hr hrs ml mph sq cu deg rad st nd rd th
"""
SYMBOLS = frozenset(_SYMBOLS.split())
LETTERS = frozenset("msghldACDFGHJKLMNPSTVW")  # units where they are set as text

# Words behind a number that change it or name something: scales, signs, relations, months, days, halves of a day.
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

# Words that are mathematics or percentages, and those that connect.
_MATH_NAMES = """
    pi infinity infty inf sqrt frac sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp
    min max gcd lcm det mod lim sup dim ker alpha beta gamma theta lambda phi percent percentage pct and or
"""
MATH_NAMES = frozenset(_MATH_NAMES.split())

BASES = {
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
    "twelve": "12",
    "sixteen": "16",
}
