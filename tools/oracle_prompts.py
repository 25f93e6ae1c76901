"""The prompts of the SmolLM2 oracles, fixed before any was run: prose, code, numbers, dialogue, other languages.

PROMPTS go to the greedy comparison, LOGIT_PROMPTS (indices into it) also to the logit comparison, TINY_PROMPT holds 12
token ids for the models of make_tiny_models.py.
"""

from __future__ import annotations

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "1, 2, 3, 5, 8, 13,",
    "Water boils at 100 degrees Celsius because",
    "import numpy as np\n\n# Compute the mean of each column\na = np.array([[1, 2], [3, 4]])\n",
    "Die Hauptstadt von Deutschland ist",
    "La photosynth\u00e8se est le processus par lequel",
    "Q: What is 12 + 30?\nA: 42\nQ: What is 7 + 8?\nA:",
    "A",
    "The three primary colours are red,",
    "SELECT name, age FROM users WHERE",
    "Dear Ms. Hartley,\n\nThank you for your letter of 3 March. I am writing to",
    "\u65e5\u672c\u306e\u9996\u90fd\u306f",
    "El agua es esencial para la vida porque",
    (
        "The history of the bicycle begins in the early nineteenth century, when a German baron built a wooden"
        " machine with two wheels in line that the rider pushed along with his feet. It had no pedals, no chain and"
        " no brakes, but it could be steered, and on a good road it was faster than a horse-drawn coach. Over the"
        " following decades, inventors in France, England and the United States added pedals, wire spokes, rubber"
        " tyres and finally the chain drive to the rear wheel. The most important change, however, was"
    ),
    (
        "#include <stdio.h>\n\nint main(void) {\n    int sum = 0;\n    for (int i = 1; i <= 10; i++) {\n        sum"
        ' += i;\n    }\n    printf("%d\\n", sum);\n'
    ),
    (
        "Ingredients:\n- 200 g flour\n- 100 g butter\n- 2 eggs\n- 80 g sugar\n\nInstructions:\n1. Preheat the oven to"
        " 180 \u00b0C.\n2."
    ),
    (
        "In this paper we study the convergence of gradient descent on smooth, strongly convex functions. Let f be a"
        " function whose gradient is Lipschitz continuous with constant L, and suppose that f is strongly convex with"
        " parameter m. We show that with a fixed step size of 1/L the distance to the minimiser shrinks by a constant"
        " factor in every iteration, and that this factor depends only on the condition number L/m. Our proof is"
        " elementary and uses only the following two inequalities. First,"
    ),
    '"I don\'t think you understand," said the captain. "There are 47 people on this ship, and',
)
LOGIT_PROMPTS = (0, 2, 7, 15)
TINY_PROMPT = (5, 100, 300, 7, 9, 44, 260, 261, 400, 13, 88, 511)
GREEDY_TOKENS = 64
TINY_GREEDY_TOKENS = 16
