"""A calculator that a tiny policy learns to call: a tool is a typed function."""

import ast
import operator

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculator(expression: str) -> str:
    """Compute a sum, a difference or a product.

    Args:
        expression: two whole numbers with +, - or * between them, such as 12*34

    """
    node = ast.parse(expression, mode="eval").body
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        raise ValueError(f"{expression!r} is no sum, difference or product of two numbers")
    left = ast.literal_eval(node.left)
    right = ast.literal_eval(node.right)
    if not (isinstance(left, int) and isinstance(right, int)):
        raise ValueError("the numbers must be whole")
    return str(OPERATORS[type(node.op)](left, right))
