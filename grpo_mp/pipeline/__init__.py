"""Several runs after each other, each with what a former one made: the stages of a recipe such as R1's."""
