"""Thirty shapes of chats that other people's templates are judged on.

The list was written down before the code that it judges. A chat is a row's messages, perhaps with tools.
"""

from __future__ import annotations

from typing import Any

Chat = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]

SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def call(*words: str, says_too: str | None = "", **fields: Any) -> dict[str, Any]:
    """A turn that calls the tool once for every word."""
    calls = [
        {"type": "function", "id": f"call0000{n}", "function": {"name": "look_up", "arguments": {"word": word}}}
        for n, word in enumerate(words)
    ]
    return says(says_too, tool_calls=calls, **fields)


def result(text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "name": "look_up", "tool_call_id": f"call0000{number}", "content": text}


def tagged(thought: str, answer: str) -> dict[str, Any]:
    """A thought in the tags that most models write."""
    return says(f"<think>\n{thought}\n</think>\n\n{answer}")


def thinks(thought: str, answer: str) -> dict[str, Any]:
    """A thought in a field of its own."""
    return says(answer, reasoning_content=thought)


ROUND = [user("What is a fen?"), call("fen"), result("a low wet land"), says("A fen is wet land.")]

SHAPES: dict[str, Chat] = {
    "one turn": ([user("Two and two?"), says("Four.")], None),
    "two turns": ([user("Two and two?"), says("Four."), user("And one?"), says("Five.")], None),
    "three turns": (
        [user("Two and two?"), says("Four."), user("And one?"), says("Five."), user("Less two?"), says("Three.")],
        None,
    ),
    "system": ([SYSTEM, user("Two and two?"), says("Four.")], None),
    "system, three turns": (
        [SYSTEM, user("One?"), says("Yes, one."), user("Two?"), says("Yes, two."), user("Three?"), says("Yes, three.")],
        None,
    ),
    "equal answers": ([user("One?"), says("Yes."), user("Two?"), says("Yes."), user("Three?"), says("Yes.")], None),
    "an answer that stands in the question": ([user("Say Yes."), says("Yes."), user("Yes."), says("Yes.")], None),
    "white space around an answer": (
        [user("One?"), says("  Yes, one. \n"), user("Two?"), says("\n\nYes, two.  ")],
        None,
    ),
    "white space around a question": ([user("\n One? \n\n"), says("Yes."), user("  Two?  "), says("Yes, two.")], None),
    "several lines": ([user("A list:\n\n1. One\n2. Two"), says("# Head\n\n* One\n* Two\n\nThe end.")], None),
    "letters and signs": ([user("Größe: 5 € – <b>?"), says("„Ja“ & {{ nein }} </b> 数")], None),
    "a long answer of one letter": ([user("?"), says("a"), user("?"), says("b")], None),
    "thought in tags": ([user("Two and two?"), tagged("Two, then two more.", "Four.")], None),
    "thoughts in tags, two turns": (
        [user("Two and two?"), tagged("Two more.", "Four."), user("And one?"), tagged("One more.", "Five.")],
        None,
    ),
    "thoughts in tags, three turns, system": (
        [
            SYSTEM,
            user("1?"),
            tagged("A.", "One."),
            user("2?"),
            tagged("B.", "Two."),
            user("3?"),
            tagged("C.", "Three."),
        ],
        None,
    ),
    "a thought in tags, then none": (
        [user("Two and two?"), tagged("Two more.", "Four."), user("And one?"), says("Five.")],
        None,
    ),
    "no thought, then one in tags": (
        [user("Two and two?"), says("Four."), user("And one?"), tagged("One more.", "Five.")],
        None,
    ),
    "thought in a field": ([user("Two and two?"), thinks("Two, then two more.", "Four.")], None),
    "thoughts in fields, two turns": (
        [user("Two and two?"), thinks("Two more.", "Four."), user("And one?"), thinks("One more.", "Five.")],
        None,
    ),
    "thoughts in fields, equal answers": (
        [SYSTEM, user("One?"), thinks("First.", "Yes."), user("Two?"), thinks("Second.", "Yes.")],
        None,
    ),
    "a call": (ROUND, TOOLS),
    "a call, content null": ([ROUND[0], call("fen", says_too=None), *ROUND[2:]], TOOLS),
    "a call with words": ([ROUND[0], call("fen", says_too="Let me look."), *ROUND[2:]], TOOLS),
    "two calls in one turn": (
        [user("A fen, a moor?"), call("fen", "moor"), result("wet land"), result("high land", 1), says("Two lands.")],
        TOOLS,
    ),
    "two calls in turn": (
        [user("A fen, a moor?"), call("fen"), result("wet"), call("moor"), result("high"), says("Wet and high.")],
        TOOLS,
    ),
    "two rounds": ([SYSTEM, *ROUND, user("And a moor?"), call("moor"), result("high land"), says("High land.")], TOOLS),
    "a chat that ends in a call": ([user("What is a fen?"), call("fen")], TOOLS),
    "a call after a thought": (
        [
            user("What is a fen?"),
            call("fen", reasoning_content="I do not know."),
            result("wet land"),
            says("Wet land."),
        ],
        TOOLS,
    ),
    "thoughts before a call and an answer": (
        [
            user("What is a fen?"),
            call("fen", reasoning_content="I do not know."),
            result("a low wet land"),
            thinks("Now I know.", "A fen is wet land."),
            user("Thanks."),
            thinks("Be polite.", "You are welcome."),
        ],
        TOOLS,
    ),
    "tools that are not called": ([SYSTEM, user("Two and two?"), says("Four.")], TOOLS),
}
