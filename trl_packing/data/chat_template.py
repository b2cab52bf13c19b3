"""A chat template and its tokenizer: render conversations, and learn how the template writes turns.

    generation prompt    <|im_start|>assistant\\n
    around an answer     "<think>\\n\\n</think>\\n\\n"  content  "<|im_end|>\\n"

Both are learned from short conversations, for `turns.py`.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import has_generation_markers

from trl_packing.data.messages import Message, check_lists, is_plain
from trl_packing.data.spans import Span

try:  # private; without it, every conversation goes through `apply_chat_template`
    from transformers.utils.chat_template_utils import _compile_jinja_template
except ImportError:  # pragma: no cover
    _compile_jinja_template = None

_MOST = 10_000_000  # no template computes with larger numbers

# A template may compute something impossible, or need more than the sandbox allows.
PASS_FAST = (
    "pass a fast tokenizer as processing_class (for Mistral, "
    "AutoTokenizer.from_pretrained(..., mistral_format=False))"
)

TEMPLATE_ERRORS = (TemplateError, TypeError, ArithmeticError, AttributeError, LookupError)


def tokenizer_in(processing_class: Any) -> Any:
    """Return a tokenizer, or the one inside a processor."""
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return processing_class  # that of mistral-common also has a `tokenizer`
    return getattr(processing_class, "tokenizer", processing_class)


@dataclass(frozen=True)
class Conversation:
    """Messages, and the other values that a row passes to its chat template."""

    messages: list[Message]
    tools: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    sanitizes: bool = False  # special tokens in its words become text

    def of(self, messages: list[Message]) -> "Conversation":
        """Return a conversation of other messages with the same tools and arguments."""
        return replace(self, messages=messages)

    @property
    def is_plain(self) -> bool:
        """Whether it is nothing but messages of a role and a content, both of them texts."""
        if self.tools is not None or self.kwargs or not self.messages:
            return False
        return all(map(is_plain, self.messages))


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer and its chat template, or the one that replaces it."""

    tokenizer: Any
    override: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer, "override": self.override}

    @cached_property
    def source(self) -> str:
        """The text of the template. Raises ValueError if there is none, or none is read."""
        try:
            return self.tokenizer.get_chat_template(self.override)
        except NotImplementedError as error:
            raise ValueError(f"the tokenizer reads no chat template; {PASS_FAST}") from error

    def check_numbers(self) -> None:
        """Raise ValueError for a template that computes with numbers that only an attack needs.

        ``{{ 'x' * 10**10 }}`` would be computed when the template is compiled, for hours.
        """
        source = self.source if self.exists else ""
        source = re.sub(r"{%-?\s*(?:end)?generation\s*-?%}", "", source)
        with suppress(TemplateError):  # rendering will raise it
            tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
            for node in tree.find_all((nodes.Const, nodes.Pow)):
                number = getattr(node, "value", math.inf)  # a power has none
                if isinstance(number, int | float) and number > _MOST:
                    raise ValueError(f"the chat template has a power, or a number above {_MOST:,}")

    @property
    def exists(self) -> bool:
        """Whether there is a template."""
        return bool(self.override or self.tokenizer.chat_template)

    def render(self, conversation: Conversation, *, generation_prompt: bool = False) -> str:
        """Return the text of a conversation; the template may raise `TEMPLATE_ERRORS`."""
        if conversation.is_plain and self._direct_render is not None:
            return self._direct_render(conversation.messages, generation_prompt)
        return self._checked(conversation, self._apply(conversation, generation_prompt))

    def try_render(
        self, conversation: Conversation, *, generation_prompt: bool = False
    ) -> str | None:
        """Return the text of a conversation, or None if the template refuses it."""
        try:
            return self.render(conversation, generation_prompt=generation_prompt)
        except TEMPLATE_ERRORS:
            return None

    def render_marked(self, conversation: Conversation) -> tuple[str, list[Span] | None]:
        """Return the text, and its characters within ``{% generation %}``; None without marks."""
        if not has_generation_markers(self.source):
            return self.render(conversation), None
        texts, spans = render_jinja_template(
            conversations=[conversation.messages],
            tools=conversation.tools,
            chat_template=self.tokenizer.get_chat_template(self.override, conversation.tools),
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **conversation.kwargs},
        )
        return self._checked(conversation, texts[0]), spans[0]

    def _checked(self, conversation: Conversation, text: str) -> str:
        check_lists(
            conversation.messages, text, lambda each: self.try_render(conversation.of(each))
        )
        return text

    def sanitized_ids(
        self, conversation: Conversation, *, generation_prompt: bool = False
    ) -> list[int]:
        """Return the token ids of a conversation whose words make no special token."""
        return self._apply(  # type: ignore[return-value]
            conversation, generation_prompt, tokenize=True, sanitize_control_tokens=True
        )

    def _apply(self, conversation: Conversation, generation_prompt: bool, **options: Any) -> str:
        return self.tokenizer.apply_chat_template(
            conversation.messages,
            tools=conversation.tools,
            chat_template=self.override,
            add_generation_prompt=generation_prompt,
            **{"tokenize": False, "return_dict": False, **options, **conversation.kwargs},
        )

    @cached_property
    def _direct_render(self) -> Callable[[list[Message], bool], str] | None:
        """The compiled template, if it renders a trial like `apply_chat_template`, else None.

        `apply_chat_template` copies and checks its inputs, for half of its time.
        """
        if _compile_jinja_template is None:
            return None
        trial = [_USER, {"role": "assistant", "content": " b\n"}, _USER]
        with suppress(*TEMPLATE_ERRORS):
            template = _compile_jinja_template(self.source)
            names = {  # jinja would collect them again for each row
                **template.globals,
                **self.tokenizer.special_tokens_map,
                "tools": None,
                "documents": None,
            }

            def render(messages: list[Message], generation_prompt: bool) -> str:
                of_row = {"messages": messages, "add_generation_prompt": generation_prompt}
                return "".join(
                    template.root_render_func(template.new_context(names | of_row, True))
                )

            if render(trial, True) == self._apply(Conversation(trial), True):
                return render
        return None

    @cached_property
    def hidden_parts(self) -> dict[Any, Collection[int]]:
        """Parts of messages that do not reach the text, by the shape of a conversation."""
        return {}  # `left_out` fills it

    @cached_property
    def generation_prompt(self) -> str:
        """The text that a generation prompt adds; "" if there is none."""
        without = self.try_render(Conversation([_USER]))
        prompt = self.try_render(Conversation([_USER]), generation_prompt=True) or ""
        return prompt[len(without) :] if without is not None and prompt.startswith(without) else ""

    @cached_property
    def around_answer(self) -> tuple[str, str]:
        """The text between the generation prompt and an answer, and the text after the answer."""
        prompt = self.try_render(Conversation([_USER]), generation_prompt=True)
        before, _, after = (self.try_render(Conversation([_USER, _ANSWER])) or "").partition(_MARK)
        lead = before.removeprefix(prompt) if prompt and before.startswith(prompt) else ""
        return lead, after

    def prompt_ends(self, text: str, starts: Sequence[int]) -> list[int]:
        """Return where a model begins to write the answers that start at `starts`.

        Marks may begin in the white space at the end of the prompt, and then the rest of it counts.
        """
        prompt = self.generation_prompt
        ends = set()
        for start in starts:
            at = text.find(prompt, max(start - len(prompt), 0), start + len(prompt))
            if at >= 0 and not text[start : at + len(prompt)].strip():
                ends.add(at + len(prompt))
            elif at >= 0 or not text[:start].rstrip().endswith(prompt.rstrip()):
                ends.add(start)
            # Else the model writes the white space before the start, in its first token.
        return sorted(ends)

    def start_of(self, role: str) -> str:
        """Return the special token with which a turn begins after an answer; "" without one.

        A token that begins every text or every turn does not tell that another one speaks.
        """
        following = Conversation([_USER, _ANSWER, {"role": role, "content": "a"}])
        after = (self.try_render(following) or "").partition(_MARK)[2]
        token = after[: self.stop_size(after)]
        begins = (self.tokenizer.bos_token or "", self.generation_prompt.lstrip())
        is_own = token.strip() and not any(each.startswith(token.strip()) for each in begins)
        return token if is_own else ""

    @cached_property
    def forms_of_arguments(self) -> dict[bool, type | None]:
        """The form of arguments of tool calls that it reads, with `tools` beside them or not.

        dict or str; None for both. Many quote a text again, some raise an error; some cannot read a
        dictionary. A tokenizer may have another template for rows with tools.
        """
        return {False: self._form_of_arguments(None), True: self._form_of_arguments([_TOOL])}

    def _form_of_arguments(self, tools: list[Any] | None) -> type | None:
        texts = []
        for arguments in (_JSON, json.loads(_JSON)):
            function = {"name": "f", "arguments": arguments}
            call = {"type": "function", "id": "call00001", "function": function}
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            texts.append(self.try_render(Conversation([_USER, answer], tools)))
        as_text, as_dict = texts
        if as_text == as_dict:
            return None
        if as_text is None:
            return dict
        if as_dict is None:
            return str
        before, _, after = as_text.partition(_JSON)
        written = as_dict.removeprefix(before).removesuffix(after)
        with suppress(ValueError):
            if json.loads(written) == json.loads(_JSON):  # perhaps with other white space
                return None
        return dict

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The tokenizer's special tokens, the longest first."""
        added = self.tokenizer.added_tokens_decoder.values()
        special = {*self.tokenizer.all_special_tokens, *(t.content for t in added if t.special)}
        return tuple(sorted(special, key=len, reverse=True))

    @cached_property
    def stop(self) -> str:
        """The special tokens behind the last answer, up to the EOS; "" without a stop (GLM).

        ChatML on a tokenizer without ChatML's tokens: the model has to stop with these words.
        """
        after = self.around_answer[1]
        eos = re.escape(self.tokenizer.eos_token or "\0")
        found = re.match(rf"\s*(?:{self._special}*?{eos}|{self._special}+)", after)
        return found[0] if found else after.rstrip()

    def stop_size(self, after: str) -> int:
        """Return how many characters at the start of `after` are a stop, with space before it."""
        if self.stop and after.startswith(self.stop):
            return len(self.stop)
        found = re.match(rf"\s*{self._special}", after)
        return found.end() if found else 0

    def up_to_stop(self, text: str) -> str:
        """Return `text` without the white space behind a special token at its end."""
        words = text.rstrip()
        return words if words.endswith(self.special_tokens) else text

    @cached_property
    def _special(self) -> str:
        """A pattern of one special token."""
        tokens = [re.escape(token) for token in self.special_tokens if token]
        return f"(?:{'|'.join(tokens) or chr(0)})"


_JSON = '{"city": "Rome"}'
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "a"}}}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "a", "parameters": _PARAMETERS},
}


_MARK = "\uf8ff"  # of the private use area
_USER, _ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}
