"""Which characters of a rendered conversation the assistant writes.

    messages      user "Hi"               assistant "Hello"
    text          <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    turn                                                                  [Hello<|im_end|>]

A turn starts where the generation prompt ends: what a template puts between it and the content (an
empty <think> block, say) the model has to write itself. It ends with its stop token.

A template with ``{% generation %}`` says so itself, and is taken at its word. Any other is asked:

    skeleton      the contents of all wanted turns replaced by a mark, rendered once more
                  text = piece  content  piece  content  piece           exact, or it is not equal
    one by one    where the template changes contents, or what is around them, one turn after the
                  other is replaced; what follows the mark follows the turn in the text too

A template that leaves out what a turn says (the reasoning of earlier turns, most often) would train
something else than the data: refused, unless ``{% generation %}`` says what to do.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import has_generation_markers
from trl.data_utils import common_prefix_length

from trl_packing.formatting.messages import Message
from trl_packing.formatting.printable import quote

try:  # not public: without it, every text takes the longer way
    from transformers.utils.chat_template_utils import _compile_jinja_template
except ImportError:  # pragma: no cover
    _compile_jinja_template = None

Span = tuple[int, int]  # [start, stop) in characters

# A template may compute what cannot be computed, or ask for more than the sandbox gives.
TEMPLATE_ERRORS = (TemplateError, TypeError, ArithmeticError, AttributeError, LookupError)

_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Context:
    """What a row gives its chat template beside the messages."""

    tools: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the tokenizer that it is for.

    `override` takes the place of the tokenizer's own template.
    """

    tokenizer: Any
    override: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer, "override": self.override}

    @cached_property
    def source(self) -> str:
        """The text of the template. Raises ValueError if there is none."""
        return self.tokenizer.get_chat_template(self.override)

    @property
    def exists(self) -> bool:
        """Whether there is a template."""
        return bool(self.override or self.tokenizer.chat_template)

    @cached_property
    def marks_generations(self) -> bool:
        """Whether the template says which characters the assistant writes."""
        return has_generation_markers(self.source)

    def render(
        self, messages: Sequence[Message], context: Context, *, generation_prompt: bool = False
    ) -> str:
        """Return the text of a conversation. Raises what the template raises."""
        plain = context.tools is None and not context.kwargs and _are_plain_texts(messages)
        if plain and self._renders_directly:
            return self._render_directly(messages, generation_prompt)
        return self._apply(messages, context, generation_prompt)

    def _apply(self, messages: Sequence[Message], context: Context, generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tools=context.tools,
            chat_template=self.override,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **context.kwargs,
        )

    # `apply_chat_template` copies and checks what a template is given; for messages of plain texts
    # that is half of its time, and nothing changes by it.

    def _render_directly(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        names = {
            **self._names,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": generation_prompt,
        }
        return "".join(self._compiled.root_render_func(self._compiled.new_context(names, True)))

    @cached_property
    def _compiled(self) -> Any:
        return _compile_jinja_template(self.source)

    @cached_property
    def _names(self) -> dict[str, Any]:
        """What the template can name in every row: jinja would collect it anew for each."""
        return {**self._compiled.globals, **self.tokenizer.special_tokens_map}

    @cached_property
    def _renders_directly(self) -> bool:
        """Whether the compiled template gives the text of `apply_chat_template`, tried on one."""
        if _compile_jinja_template is None:
            return False
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b\n"}]
        for number, prompt in ((1, True), (1, False), (2, False)):
            try:
                direct = self._render_directly(messages[:number], prompt)
                if direct != self._apply(messages[:number], Context(), prompt):
                    return False
            except TEMPLATE_ERRORS:
                continue  # neither gives a text
        return True

    def render_marked(self, messages: list[Message], context: Context) -> tuple[str, list[Span]]:
        """Return the text and the characters that the template marks with ``{% generation %}``."""
        texts, spans = render_jinja_template(
            conversations=[messages],
            tools=context.tools,
            chat_template=self.tokenizer.get_chat_template(self.override, context.tools),
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **context.kwargs},
        )
        return texts[0], spans[0]

    def turns(
        self,
        messages: list[Message],
        context: Context,
        wanted: Sequence[int],
        *,
        alike: bool = True,
    ) -> tuple[str, dict[int, list[Span]]]:
        """Return the text, and the characters of each wanted message that a model is to write.

        alike: all are trained in the same way, so it does not matter whose a span is if all
            assistant messages are wanted.

        Raises ValueError, naming the message, where the template leaves out what it says.
        """
        if self.marks_generations:
            return self._marked_turns(messages, context, wanted, alike)
        text = self.render(messages, context)
        return text, {n: [span] for n, span in self._found(text, messages, context, wanted).items()}

    # --- with {% generation %} --------------------------------------------------------------------

    def _marked_turns(
        self, messages: list[Message], context: Context, wanted: Sequence[int], alike: bool
    ) -> tuple[str, dict[int, list[Span]]]:
        text, spans = self.render_marked(messages, context)
        assistants = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
        marked: dict[int, list[Span]] = {number: [] for number in wanted}
        if len(spans) == len(assistants):
            owners = assistants
        elif alike and assistants and set(wanted) >= set(assistants):
            owners = [assistants[-1]] * len(spans)
        else:
            owners = self._owners(text, messages, context, spans)
        for owner, span in zip(owners, spans, strict=True):
            if owner in marked:
                marked[owner].append(span)
        others = [n for n in wanted if n not in assistants]
        found = self._found(text, messages, context, others)
        return text, marked | {number: [span] for number, span in found.items()}

    def _owners(
        self, text: str, messages: list[Message], context: Context, spans: list[Span]
    ) -> list[int]:
        """Return whose each span is: the last assistant message that starts before its end."""
        starts = {
            number: self._begin(text, messages, context, number)[0]
            for number, message in enumerate(messages)
            if message["role"] == "assistant"
        }
        return [
            max((n for n, start in starts.items() if start < stop), default=min(starts))
            for _, stop in spans
        ]

    # --- without ----------------------------------------------------------------------------------

    def _found(
        self, text: str, messages: list[Message], context: Context, wanted: Sequence[int]
    ) -> dict[int, Span]:
        found = self._by_skeleton(text, messages, context, wanted)
        for number in wanted:
            if number not in found:
                start, stop = self._one_by_one(text, messages, context, number)
                _check_complete(number, messages[number], text[start:stop])
                found[number] = start, stop
        return found

    def _by_skeleton(
        self, text: str, messages: list[Message], context: Context, wanted: Sequence[int]
    ) -> dict[int, Span]:
        """Return the turns of plain messages, if only their contents lie between the pieces."""
        mark = _absent_from(text)
        plain = [number for number in wanted if _is_plain(messages[number])]
        pieces = (self._rendered(_replaced(messages, plain, mark), context) or "").split(mark)
        if len(pieces) != len(plain) + 1 or not text.startswith(pieces[0]):
            return {}
        spans, at = {}, len(pieces[0])
        for number, before, after in zip(plain, pieces, pieces[1:], strict=False):
            content = messages[number]["content"]
            forms = (content, content.strip(), content.rstrip(), content.lstrip())
            size = next((len(f) for f in forms if text.startswith(f + after, at)), None)
            if size is None:
                return {}
            lead = self._lead(before, messages[number]["role"], context)
            if lead is not None:
                spans[number] = (at - len(lead), at + size + self._stop_size(after))
            at += size + len(after)
        return spans if at == len(text) else {}

    def _begin(
        self, text: str, messages: list[Message], context: Context, number: int
    ) -> tuple[int, str]:
        """Return where a turn starts in `text`, and what follows its content."""
        mark = _absent_from(text)
        role = messages[number]["role"]
        plain = {"role": role, "content": mark}
        # A tool's message must follow a tool call, ...
        replaced = self._rendered([*messages[:number], plain, *messages[number + 1 :]], context)
        before, _, after = replaced.partition(mark) if replaced else (mark, mark, mark)
        start = self._start(text, before, messages[:number], context, role)
        if start is None:
            raise ValueError(
                f"the chat template renders other text before message {number} than its generation "
                "prompt, so where the model begins to write cannot be told; use a template with "
                "{% generation %}, or train_on='all'"
            )
        return start, after

    def _one_by_one(
        self, text: str, messages: list[Message], context: Context, number: int
    ) -> Span:
        start, after = self._begin(text, messages, context, number)
        limit = self._next_content(text, messages, context, number)
        ends = (
            len(text) - len(after) + self._stop_size(after) if text.endswith(after) else None,
            self._end(text, messages[: number + 1], context),
        )
        stop = next((end for end in ends if end is not None and start <= end <= limit), None)
        if stop is None:
            raise ValueError(
                f"the chat template renders message {number} otherwise once more messages follow, "
                "so where the model has to stop cannot be told; use a template with "
                "{% generation %}, or train_on='last_assistant' or 'all'"
            )
        return start, stop

    def _next_content(
        self, text: str, messages: list[Message], context: Context, number: int
    ) -> int:
        """Return where the content of the next message begins; some render it in the same turn."""
        if number + 1 == len(messages) or not _is_plain(messages[number + 1]):
            return len(text)
        mark = _absent_from(text)
        replaced = self._rendered(_replaced(messages, [number + 1], mark), context)
        before = (replaced or mark).partition(mark)[0]
        return len(before) if replaced and text.startswith(before) else len(text)

    def _start(
        self, text: str, before: str, earlier: list[Message], context: Context, role: str
    ) -> int | None:
        """Return where the generation prompt of a turn ends in `text`."""
        if role == "assistant" and earlier:
            prompt = self._rendered(earlier, context, generation_prompt=True)
            if prompt and text.startswith(prompt):
                return len(prompt)
        if not text.startswith(before):
            return None
        header = self._header(role)
        start = before.rindex(header) + len(header) if header in before else 0
        # Some templates let a message go on in the turn of the one before: that header is not its.
        said = self._rendered(earlier, context) if earlier else None
        return start if start > common_prefix_length(said or "", text) else len(before)

    def _end(self, text: str, messages: list[Message], context: Context) -> int | None:
        """Return where the last of `messages` ends in `text`, if what follows leaves it alone."""
        rendered = self._rendered(messages, context)
        if not rendered or not text.startswith(rendered):
            return None
        stripped = rendered.rstrip()
        return len(stripped if stripped.endswith(self._special_tokens) else rendered)

    def _rendered(
        self, messages: list[Message], context: Context, *, generation_prompt: bool = False
    ) -> str | None:
        """Return the text of a conversation; None if the template refuses it."""
        try:
            return self.render(messages, context, generation_prompt=generation_prompt)
        except TEMPLATE_ERRORS:
            return None

    def _header(self, role: str) -> str:
        """Return what a generation prompt adds; "" for other roles, which need none."""
        return self._generation_prompt if role == "assistant" else ""

    @cached_property
    def _generation_prompt(self) -> str:
        user = [{"role": "user", "content": "a"}]
        without = self._rendered(user, Context())
        prompt = self._rendered(user, Context(), generation_prompt=True)
        if without is None or prompt is None or not prompt.startswith(without):
            return ""
        return prompt.removeprefix(without)

    def _lead(self, before: str, role: str, context: Context) -> str | None:
        """Return what of the piece `before` a content the assistant writes; None if unknown."""
        if role != "assistant":
            return ""
        # Not with arguments, by which a template may choose another generation prompt.
        leads = [] if context.kwargs else [self._around_answer[0]]
        if self._generation_prompt:
            leads.append("")
        return next((x for x in leads if before.endswith(self._generation_prompt + x)), None)

    @cached_property
    def _around_answer(self) -> tuple[str, str]:
        """What the template writes before a content, after its generation prompt, and behind."""
        user = {"role": "user", "content": "a"}
        mark = _absent_from("")
        asked = self._rendered([user], Context(), generation_prompt=True)
        answered = self._rendered([user, {"role": "assistant", "content": mark}], Context())
        before, _, after = (answered or "").partition(mark)
        lead = before.removeprefix(asked) if asked and before.startswith(asked) else ""
        return lead, after

    @cached_property
    def _special_tokens(self) -> tuple[str, ...]:
        added = self.tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special}
        return tuple(
            sorted(special | set(self.tokenizer.all_special_tokens), key=len, reverse=True)
        )

    def _stop_size(self, after: str) -> int:
        """Return the length of the stop at the start of `after`, and of space before it."""
        space = len(after) - len(after.lstrip())
        for token in self._special_tokens:
            if after.startswith(token, space):
                return space + len(token)
        # ChatML on a tokenizer without its tokens: then words are what a model has to stop with.
        words = self._around_answer[1].rstrip()
        return len(words) if after.startswith(words) else 0


def _are_plain_texts(messages: Sequence[Message]) -> bool:
    """Whether all messages are a role and a content, both of them texts and nothing else."""
    for message in messages:
        if len(message) != 2 or type(message) is not dict:
            return False
        if type(message.get("role")) is not str or type(message.get("content")) is not str:
            return False
    return len(messages) > 0


def _is_plain(message: Message) -> bool:
    content = message.get("content")
    if not isinstance(content, str) or not content or "</think>" in content:
        return False
    return not any(message.get(key) for key in ("tool_calls", *_REASONING))


def _replaced(messages: list[Message], numbers: Sequence[int], mark: str) -> list[Message]:
    return [{**m, "content": mark} if n in numbers else m for n, m in enumerate(messages)]


def _absent_from(text: str) -> str:
    """Return a character of the private use area that `text` does not have."""
    return next(mark for mark in map(chr, range(0xF8FF, 0xE000, -1)) if mark not in text)


def _check_complete(number: int, message: Message, turn: str) -> None:
    """Raise ValueError if `turn` leaves out what `message` says."""
    content = message.get("content")
    reasoning = {message[name] for name in _REASONING if isinstance(message.get(name), str)}
    said = []
    if isinstance(content, str):
        *thoughts, last = re.split(r"</?think>", content)
        said.append(("content", last))
        reasoning |= set(thoughts[-1:])
    said += [("reasoning", words) for words in reasoning]
    for call in message.get("tool_calls") or ():
        said.append(("tool call", str((call.get("function") or call).get("name"))))
    # Each in a place of its own, long ones first: an answer often repeats its reasoning.
    for name, words in sorted(said, key=lambda pair: -len(pair[1])):
        before, found, after = turn.partition(words.strip() or "\0")
        if words.strip() and not found:
            raise ValueError(
                f"the chat template leaves out the {name} of message {number} "
                f"({quote(words.strip()[:40])}), so the model would be trained to leave it out. "
                "Use a template that keeps it or has {% generation %}, "
                "train_on='last_assistant' if it is kept there, or remove it from the data"
            )
        turn = f"{before}\0{after}"
