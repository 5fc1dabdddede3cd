"""Rows that speak to the chat endpoint: instructions, turns, tools, thinking."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from merestone.probe import streams
from merestone.probe.context import Probe, gather
from merestone.probe.conversation import Conversation, instruction_end
from merestone.probe.report import Check

TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look up the {name} of a place",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
            },
        },
    }
    for name in ("weather", "distance")
)


def system(content: str) -> dict[str, Any]:
    """A system message."""
    return {"role": "system", "content": content}


def user(content: str) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(content: str, thinking: str | None = None) -> dict[str, Any]:
    """A reply of the assistant, with or without thinking."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return message if thinking is None else {**message, "reasoning_content": thinking}


def tool_round(number: int, result: str) -> list[dict[str, Any]]:
    """The assistant's call of a tool, and the tool's result."""
    identity = f"call_{number}"
    function = {"name": "weather", "arguments": json.dumps({"place": f"town {number}"})}
    calls = [{"id": identity, "type": "function", "function": function}]
    return [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": identity, "content": result},
    ]


def eight_turns(template: Mapping[str, Any]) -> Any:
    """Instruction, turn and response boundaries in a chat with tools and thinking. Every other
    turn goes on with the server's own reply, the others with a tool round and a thought."""

    async def row(probe: Probe, check: Check) -> None:
        talk = Conversation(probe, check)
        tokens = probe.pick(8, 64)
        messages = [system(streams.text(probe.pick(80, 400), 1, seed=probe.seed))]
        for turn in range(8):
            messages.append(user(streams.text(probe.pick(20, 120), turn, seed=probe.seed)))
            name = f"turn {turn + 1}"
            reply = await talk.say(messages, tokens, name, tools=TOOLS, template=template)
            check.note("L", reply.prompt_tokens)
            check.note("C", reply.cached)
            if turn % 2 == 0:
                messages.append({"role": "assistant", "content": "", **reply.message})
                continue
            messages += tool_round(turn, streams.text(40, turn + 100, seed=probe.seed))
            await talk.say(messages, tokens, f"{name}, tool", tools=TOOLS, template=template)
            messages.append(assistant("It is so.", streams.text(30, turn, seed=probe.seed)))

    return row


async def exact_instruction(probe: Probe, check: Check) -> None:
    """C02: system messages of exactly so many tokens, below any page; another one finds nothing."""
    for size in probe.pick((1, 63, 64, 65, 128), (1, 63, 64, 65, 127, 128, 129, 1000)):
        content = streams.text(size, 7, seed=probe.seed)
        length = len(await probe.server.tokenize(content))
        talk = Conversation(probe, check)
        for turn in range(probe.pick(3, 4)):
            question = user(streams.text(20, turn, seed=probe.seed))
            name = f"{length} tokens, user {turn + 1}"
            reply = await talk.say([system(content), question], 4, name)
            if turn:
                check.at_least(reply, length, name)
        other = [system(streams.text(size, 8, seed=probe.seed)), question]
        reply = await talk.say(other, 4, f"another {length} tokens")
        check.cached(reply, 0, f"another system message of {length} tokens")


async def shared_instructions(probe: Probe, check: Check) -> None:
    """C04: a few shared instructions, each with many unique questions, one request at a time."""
    await _instructions(probe, check, width=1)


async def shared_instructions_at_once(probe: Probe, check: Check) -> None:
    """C05: the same at concurrency 1, 4 and 16: what is restored must not depend on it."""
    found = [await _instructions(probe, check, width) for width in (1, 4, 16)]
    for width, hits in zip((4, 16), found[1:], strict=True):
        check.that(hits == found[0], f"C at concurrency {width} is {hits}, alone {found[0]}")


async def _instructions(probe: Probe, check: Check, width: int) -> list[int]:
    """C of every request after each instruction's first, in order."""
    groups, questions, shared, unique = probe.pick((2, 4, 300, 100), (8, 8, 1500, 700))
    # A cold control for each would be most of the work; one a group shows the same.
    talk = Conversation(probe, check, control=False)
    hits: dict[tuple[int, int], int] = {}

    async def one(group: int, question: int) -> None:
        number = group * 100 + question
        messages = [
            system(streams.text(shared, group, seed=probe.seed)),
            user(streams.text(unique, number + 1000, seed=probe.seed)),
        ]
        name = f"instruction {group}, question {question}"
        reply = await talk.say(messages, 4, name, stream=True)
        check.note("warm first s" if question else "cold first s", reply.first_s)
        hits[group, question] = reply.cached
        if question == questions - 1:
            oracle = await probe.server.chat(messages, 4, salt=probe.salt())
            check.equal(reply, oracle, name)

    await gather(width, [partial(one, group, 0) for group in range(groups)])
    rest = [(g, q) for q in range(1, questions) for g in range(groups)]
    await gather(width, [partial(one, *place) for place in rest])
    return [hits[place] for place in rest]


async def trailing_time(probe: Probe, check: Check) -> None:
    """C39: requests that differ only in a trailing time stamp restore all before that message."""
    talk = Conversation(probe, check)
    first = system(streams.text(probe.pick(300, 1000), 3, seed=probe.seed))
    for second in range(5):
        messages = [first, user(f"time=12:34:{10 + second}")]
        end = await instruction_end(probe, messages)
        reply = await talk.say(messages, 4, f"send {second + 1}")
        check.at_least(reply, end if second else 0, f"send {second + 1}")


async def dropped_thinking(probe: Probe, check: Check) -> None:
    """C24: thinking that the next turn leaves out is in no state that the turn resumes from."""
    talk = Conversation(probe, check)
    thought = streams.text(300, 5, seed=probe.seed)
    messages = [user("What is it?"), assistant("This.", thought)]
    await talk.say(messages[:1], 8, "the question")
    talked = await talk.say([*messages, *tool_round(1, "a result")], 8, "with its thinking")
    check.note("L", talked.prompt_tokens)
    longer = [*messages, user("And now?")]
    await talk.say(longer, 8, "a user message drops it")
    await talk.say(longer, 8, "kept by the template", template={"clear_thinking": False})
    bare = [messages[0], assistant("This."), user("And now?")]
    await talk.say(bare, 8, "left out by the client")


async def tool_rounds(probe: Probe, check: Check) -> None:
    """C38: rounds of call, result, answer, next user message: none loses the state before it."""
    talk = Conversation(probe, check)
    messages = [system("You may call tools.")]
    before = 0
    for number in range(5):
        messages.append(user(streams.text(30, number, seed=probe.seed)))
        for step in ("question", "result"):
            if step == "result":
                size = probe.pick(100, 400)
                messages += tool_round(number, streams.text(size, number + 50, seed=probe.seed))
            reply = await talk.say(messages, 4, f"round {number + 1}, {step}", tools=TOOLS)
            check.note("C", reply.cached)
            check.that(
                reply.cached >= before, f"round {number + 1}, {step}: C={reply.cached} < {before}"
            )
            before = len(reply.prompt_ids)
        messages.append(assistant(streams.text(20, number + 70, seed=probe.seed)))


async def thinking_off(probe: Probe, check: Check) -> None:
    """C47: the empty thinking block of a generation prompt does not cut turns apart."""
    talk = Conversation(probe, check)
    messages: list[dict[str, Any]] = []
    template = {"enable_thinking": False}
    for turn in range(5):
        messages.append(user(streams.text(probe.pick(80, 300), turn, seed=probe.seed)))
        reply = await talk.say(messages, 8, f"turn {turn + 1}", template=template)
        check.note("C", reply.cached)
        messages.append(assistant(reply.message.get("content") or ""))


async def tool_loop(probe: Probe, check: Check) -> None:
    """C48: one user message and a long loop of tools; then a step again with an edited result."""
    steps, size, edited = probe.pick((6, 60, 3), (40, 200, 20))
    talk = Conversation(probe, check, control=not probe.full)
    messages = [system("You may call tools."), user("Visit every town.")]
    lengths: list[int] = []
    prefixes: list[Sequence[Mapping[str, Any]]] = []
    for step in range(steps):
        reply = await talk.say(messages, 4, f"step {step + 1}", tools=TOOLS)
        if lengths:
            check.at_least(reply, lengths[-1] - 16, f"step {step + 1}")
        lengths.append(len(reply.prompt_ids))
        prefixes.append(list(messages))
        messages += tool_round(step, streams.text(size, step, seed=probe.seed))
    changed = [*prefixes[edited - 1], *tool_round(edited - 1, "edited")]
    reply = await talk.say(changed, 4, f"step {edited} with an edited result", tools=TOOLS)
    check.at_least(reply, lengths[edited - 1] - 16, f"step {edited} with an edited result")


async def both_dialects(probe: Probe, check: Check) -> None:
    """C40: the same chat by every endpoint: equal ids, equal C."""
    chat, streamed, plain = (Conversation(probe, check, control=False) for _ in range(3))
    messages = [system(streams.text(100, 4, seed=probe.seed))]
    for turn in range(5):
        messages.append(user(streams.text(40, turn, seed=probe.seed)))
        name = f"turn {turn + 1}"
        one = await chat.say(messages, 8, f"{name}, chat")
        two = await streamed.say(messages, 8, f"{name}, streamed", stream=True)
        _, boundaries = await probe.server.render(messages)
        marks = [at for at, _ in boundaries or ()]
        three = await plain.ask(one.prompt_ids, 8, f"{name}, completions", marks=marks)
        check.that(one.prompt_ids == two.prompt_ids, f"{name}: other ids when streamed")
        check.that(one.ids == two.ids == three.ids, f"{name}: other answers by dialect")
        hits = [one.cached, two.cached, three.cached]
        check.that(len(set(hits)) == 1, f"{name}: C differs by dialect: {hits}")
        check.note("C", one.cached)
        messages.append(assistant(streams.text(30, turn + 40, seed=probe.seed)))


async def long_runs(probe: Probe, check: Check) -> None:
    """C52: many chats of many turns, interleaved: late turns hit as often as early ones."""
    chats, turns = probe.pick((3, 6), (20, 30))
    talks = [Conversation(probe, check, control=False) for _ in range(chats)]
    prompts = [[user(streams.text(40, number, seed=probe.seed))] for number in range(chats)]
    shares: list[float] = []
    for turn in range(turns):
        for number, (talk, messages) in enumerate(zip(talks, prompts, strict=True)):
            reply = await talk.say(messages, 4, f"chat {number + 1}, turn {turn + 1}")
            if turn:
                shares.append(reply.cached / len(reply.prompt_ids))
            messages.append(assistant(reply.message.get("content") or "so"))
            messages.append(user(streams.text(30, turn + 100, seed=probe.seed)))
    third = len(shares) // 3
    first, last = sum(shares[:third]) / third, sum(shares[-third:]) / third
    check.note("hit share, first third", first)
    check.note("hit share, last third", last)
    check.that(last >= 0.9 * first, f"hit share falls from {first:.3f} to {last:.3f}")
