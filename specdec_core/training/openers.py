"""How a user's turn begins that the target is to go on with (questions.Asked). An empty one leaves it all to it."""

from __future__ import annotations

from types import MappingProxyType

OPENERS = MappingProxyType(
    {
        "math": tuple(
            """
A
If
Find
Solve
How many
Calculate
What is the sum of
What is the probability
In a school,
There are
Suppose that
A farmer
Simplify the
Explain how to
The price of
Two numbers
Prove that
Convert
A train
Given that
What is the value of
Let
""".strip("\n").split("\n")
        ),
        "code": tuple(
            """
Write a Python
Write a function that
How do I
Write a SQL query
Fix this code:
What does this
Explain what
Create a class
Implement
Write a program
In JavaScript,
Write a Python function to
Given a list of
Write a script that
How can I use
Write a regular expression
Write a bash
Here is a Python function:
What is the difference between
Create a simple HTML
Write a test for
Design a Python
""".strip("\n").split("\n")
        ),
        "chat": ("", "", "", "I", "Can you", "Write", "What", "", "Please", "How", "My", "Summarize", "Give me", "The"),
    }
)
