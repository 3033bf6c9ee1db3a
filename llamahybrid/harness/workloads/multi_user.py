"""Conversations as bare tokens: users who take turns, batches on one prompt, prompts of coding agents."""

from __future__ import annotations

from llamahybrid.harness.conversation import Conversation, Request
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.harness.workloads.tokens import Workload


def four_users(
    speech: Speech, system: int = 150, turns: int = 5, answer: int = 60, thinking: int = 30
) -> Conversation:
    """Four chats with system prompts of their own take turns; thinking is stripped from each history."""
    histories = [speech.message(system, "system") for _ in range(4)]
    for _ in range(turns):
        for i in range(4):
            histories[i] += speech.message(50)
            said = yield Request(answer, histories[i] + speech.reply(thinking=thinking > 0), chat=str(i))
            kept = speech.spoken(said.tokens[speech.size(thinking) :]) if thinking else said.tokens
            histories[i] += [*speech.reply(), *kept]


def shared_system_prompt(speech: Speech) -> Conversation:
    """Eight chats begin with one system prompt, and go on in an order that mixes them."""
    system = speech.message(400, "system")
    histories = [list(system) for _ in range(8)]
    for turn in range(3):
        for i in range(8):
            chat = (3 * i + turn) % 8
            histories[chat] += speech.message(60) + speech.reply()
            answer = yield Request(40, histories[chat], chat=str(chat))
            histories[chat] += answer.tokens


def few_shot(speech: Speech) -> Conversation:
    """A prompt of worked examples with another question at its end each time."""
    examples = speech.message(30, "system")
    for _ in range(6):
        examples += speech.message(60) + speech.reply() + speech.message(40)
    for _ in range(10):
        yield Request(16, examples + speech.message(30) + speech.reply())


def document_questions(speech: Speech) -> Conversation:
    """Two documents of 1,500 tokens, asked about in turn; each question starts from the document alone."""
    documents = [speech.message(40, "system") + speech.message(1500) for _ in range(2)]
    for _ in range(4):
        for i, document in enumerate(documents):
            yield Request(40, document + speech.message(30) + speech.reply(), chat=str(i))


def interrupted_agents(speech: Speech) -> Conversation:
    """Two agents with tools of their own; calls and results of 200 tokens alternate at random lengths."""
    agents = [speech.message(400, "system") + speech.message(40) + speech.reply() for _ in range(2)]
    for step in range(10):
        i = (step // 2 + step // 3) % 2
        answer = yield Request(40, agents[i], chat=str(i))
        agents[i] = [*agents[i], *answer.tokens, *speech.message(200), *speech.reply()]


def sub_agents(speech: Speech) -> Conversation:
    """An agent that hands three tasks to sub-agents; all share tools, each has a history of its own."""
    tools = speech.message(300, "system")
    main = tools + speech.message(60) + speech.reply()
    for number in range(3):
        answer = yield Request(30, main, chat="main")
        sub = tools + speech.message(20, "system") + speech.message(40) + speech.reply()
        for _ in range(3):
            call = yield Request(30, sub, chat=f"sub-{number}")
            sub = [*sub, *call.tokens, *speech.message(80), *speech.reply()]
        report = speech.message(40)
        main = [*main, *answer.tokens, *report, *speech.reply()]


CROWDS = (
    Workload("four users", four_users),
    Workload("shared system prompt", shared_system_prompt),
    Workload("few-shot", few_shot),
    Workload("document questions", document_questions, n_ctx=8192),
    Workload("two agents", interrupted_agents, n_ctx=8192),
)
