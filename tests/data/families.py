"""Chat templates that render what those of popular families render, in our own words, each with its tokens.

Where a family differs between its models, the name says which one is meant. Tools are rendered where the families do.
"""

# ruff: noqa: E501 - templates are easier to read whole
from __future__ import annotations

from dataclasses import dataclass

PROMPT = "{% if add_generation_prompt %}"
ALTERNATE = (
    "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles have to alternate') }}{% endif %}{% endfor %}"
)
THOUGHT = (
    "{% set said = m.content or '' %}{% set thought = m.reasoning_content or '' %}{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)
"""Divides what a message says into its thought and the rest."""
LAST_USER = (
    "{% set at = namespace(user=messages | length - 1) %}"
    "{% for m in messages if m.role == 'user' %}{% set at.user = messages.index(m) %}{% endfor %}"
)
CALLS = "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"


@dataclass(frozen=True)
class Family:
    template: str
    special: str
    """Special tokens, divided by spaces."""
    answer: str
    """What is trained for the answer `A1` to one question."""
    ends: str
    """Tokens at which a response ends, divided by spaces, besides the tokenizer's own."""
    added: str = ""
    """Added tokens that are not special."""
    eos: str = "<|endoftext|>"
    bos: str = ""
    rewrites: bool = False
    """Earlier turns have another form than the last one."""


def plain(
    system: str, user: str, assistant: str, end: str, begin: str = "", after: str = "", content: str = "m.content"
) -> str:
    """A template that writes a header, the content and an end for each message."""
    turns = "".join(
        f"{{% {word} m.role == '{role}' %}}{head}{{{{ {content} }}}}{end}{after}"
        for word, role, head in (("if", "system", system), ("elif", "user", user), ("elif", "assistant", assistant))
    )
    return f"{begin}{{% for m in messages %}}{turns}{{% endif %}}{{% endfor %}}{PROMPT}{assistant}{{% endif %}}"


def chatml(begin: str = "", tool: bool = True, said: str = "{{ m.content or '' }}") -> str:
    """ChatML, with calls of tools as Hermes writes them."""
    result = (
        "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    )
    return (
        begin + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
        f"{said}{CALLS if tool else ''}<|im_end|>\n{result if tool else ''}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        f"{PROMPT}<|im_start|>assistant\n{{% endif %}}"
    )


IM = "<|im_start|> <|im_end|>"
QWEN3_SAID = (
    f"{THOUGHT}{{% if loop.index0 > at.user and (loop.last or thought) %}}<think>\n{{{{ thought }}}}\n</think>\n\n"
    "{% endif %}{{ said }}"
)
QWEN35_SAID = (
    f"{THOUGHT}{{% if loop.index0 > at.user %}}<think>\n{{{{ thought }}}}\n</think>\n\n{{% endif %}}{{{{ said }}}}"
)
NEMOTRON3_SAID = (
    f"{THOUGHT}{{% if thought and loop.index0 > at.user %}}{{{{ m.content.strip() if '</think>' in m.content else "
    "'<think>\\n' + thought + '\\n</think>\\n' + said }}{% else %}<think></think>{{ said.rstrip() }}{% endif %}"
)
LLAMA3 = (f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("system", "user", "assistant"))
HEADERS = tuple(LLAMA3)
LLAMA_TOKENS = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|>"
MISTRAL = (
    "{{ bos_token }}%s{%% for m in messages %%}{%% if m.role == 'user' %%}[INST]%s{{ m.content }}%s[/INST]"
    "{%% elif m.role == 'system' %%}%s{%% elif m.role == 'tool' %%}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{%% elif m.tool_calls %%}[TOOL_CALLS][{%% for c in m.tool_calls %%}{{ c.function | tojson }}{%% endfor %%}]"
    "{{ eos_token }}{%% else %%}%s{{ m.content }}{{ eos_token }}{%% endif %%}{%% endfor %%}"
)
INST = "[INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] <s> </s> <unk>"
GLM_ANSWER = (
    THOUGHT + "<|assistant|>\n{% if loop.index0 > at.user and thought %}<think>{{ thought }}</think>"
    "{% else %}<think></think>{% endif %}{% if said.strip() %}{{ '\n' + said.strip() }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name }}{% for k, v in c.function.arguments.items() %}"
    "{{ '\n<arg_key>' + k }}</arg_key>\n<arg_value>{{ v }}</arg_value>{% endfor %}{{ '\n</tool_call>' }}{% endfor %}"
)
GLM = (
    "[gMASK]<sop>" + LAST_USER + "{% for m in messages %}{% if m.role == 'assistant' %}" + GLM_ANSWER
    + "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}" + PROMPT + "<|assistant|>{% endif %}"
)  # fmt: skip
GLM_TOKENS = "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"
DEEPSEEK_ENDS = "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>"
DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"


def deepseek(opening: str, begins: str = "", drops: bool = True) -> str:
    """DeepSeek's templates, which remove thinking; `opening` is in the generation prompt, `begins` in every answer."""
    said = "m.content.split('</think>')[-1]" if drops else "m.content"
    return (
        "{{ bos_token }}{% set s = namespace(tool=false) %}"
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set s.tool = false %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'tool' %}{% set s.tool = true %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
        "{% elif m.tool_calls %}<｜Assistant｜>" + begins + "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
        "{{ c.function | tojson }}{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        "{% elif m.role == 'assistant' %}{% if not s.tool %}<｜Assistant｜>" + begins + "{% endif %}"
        "{% set s.tool = false %}{{ " + said + " }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt and not s.tool %}<｜Assistant｜>" + opening + "{% endif %}"
    )


GPT_OSS = (
    "<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>"
    "{% for m in messages %}{% if m.role == 'system' %}<|start|>developer<|message|># Instructions\n\n{{ m.content }}"
    "<|end|>{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions.add to=assistant<|channel|>commentary<|message|>{{ m.content }}"
    "<|end|>{% elif m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif loop.last %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    + PROMPT + "<|start|>assistant{% endif %}"
)  # fmt: skip
NANO2 = (
    "<SPECIAL_10>System\n{% for m in messages if m.role == 'system' %}{{ m.content.strip() }}{% endfor %}\n\n"
    "{% for m in messages %}{% if m.role == 'user' %}<SPECIAL_11>User\n{{ m.content.strip() }}\n"
    "{% elif m.role == 'assistant' and loop.last and m.content.strip() %}<SPECIAL_11>Assistant\n<think>\n\n"
    "{{ m.content.strip() }}\n<SPECIAL_12>\n\n{% elif m.role == 'assistant' %}<SPECIAL_11>Assistant\n"
    "{{ m.content.split('</think>')[-1].strip() }}\n<SPECIAL_12>\n\n{% endif %}{% endfor %}"
    + PROMPT + "<SPECIAL_11>Assistant\n<think>\n\n{% endif %}"
)  # fmt: skip
COHERE = tuple(f"<|START_OF_TURN_TOKEN|><|{name}_TOKEN|>" for name in ("SYSTEM", "USER", "CHATBOT"))
COHERE_TOKENS = (
    "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> "
    "<|START_RESPONSE|> <|END_RESPONSE|>"
)
MINIMAX = (
    LAST_USER + "]~!b[]~b]system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% else %}You are a helpful assistant.{% endif %}[e~[\n"
    "{% for m in messages %}{% if m.role == 'user' %}]~b]user\n{{ m.content }}[e~[\n"
    "{% elif m.role == 'assistant' %}" + THOUGHT + "]~b]ai\n{% if thought and loop.index0 > at.user %}<think>\n"
    "{{ thought }}\n</think>\n\n{% endif %}{{ said }}[e~[\n{% endif %}{% endfor %}" + PROMPT + "]~b]ai\n<think>\n{% endif %}"
)  # fmt: skip
APERTUS = (
    "{{ bos_token }}<|system_start|>{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% else %}You are Apertus.{% endif %}<|system_end|>{% set s = namespace(open=false) %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}{% if s.open %}<|assistant_end|>{% endif %}"
    "{% set s.open = false %}<|user_start|>{{ m.content }}<|user_end|>{% elif m.role == 'assistant' %}"
    "{% if not s.open %}<|assistant_start|>{% endif %}{% set s.open = true %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not s.open %}<|assistant_start|>{% endif %}"
)
KIMI = (
    "{% if messages[0].role != 'system' %}<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>"
    "{% endif %}{% for m in messages %}{% if m.role == 'system' or m.role == 'tool' %}<|im_system|>{{ m.role }}"
    "{% elif m.role == 'user' %}<|im_user|>user{% else %}<|im_assistant|>assistant{% endif %}<|im_middle|>"
    "{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>"
    "{{ c.id }}{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
    "<|im_end|>{% endfor %}" + PROMPT + "<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
KIMI_TOKENS = (
    "<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|im_end|> <|tool_calls_section_begin|> "
    "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_end|>"
)
HUNYUAN = (
    "{% for m in messages %}{% if m.role == 'system' %}<|startoftext|>{{ m.content }}<|extra_4|>"
    "{% elif m.role == 'user' %}{% if loop.index0 != 1 or messages[0].role != 'system' %}<|startoftext|>{% endif %}"
    "{{ m.content }}<|extra_0|>{% else %}{{ m.content }}<|eos|>{% endif %}{% endfor %}"
)
GEMMA4 = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "<tool_call|>{% endfor %}{{ m.content | trim }}<turn|>\n{% endfor %}"
    + PROMPT + "<|turn>model\n<|channel>thought\n<channel|>{% endif %}"
)  # fmt: skip
GEMMA = plain(
    "", "<start_of_turn>user\n", "<start_of_turn>model\n", "<end_of_turn>", "{{ bos_token }}", "\n", "m.content | trim"
)
GEMMA_TOKENS = "<bos> <eos> <pad> <start_of_turn> <end_of_turn>"
OLMO2 = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}"
    "{{ eos_token }}{% if not loop.last %}\n{% endif %}{% else %}\n{% endif %}{% endfor %}"
    + PROMPT + "<|assistant|>\n{% endif %}"
)  # fmt: skip
PHI = tuple(f"<|{role}|>\n" for role in ("system", "user", "assistant"))
PHI_TOKENS = "<|system|> <|user|> <|assistant|> <|end|> <|endoftext|>"
SMOLLM3 = (
    "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are helpful."
    "{% endif %}<|im_end|>\n{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\n' + m.content.lstrip('\n') + '<|im_end|>\n' }}"
    "{% endgeneration %}{% elif m.role == 'tool' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + PROMPT + "<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
OLMO3 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful. <functions></functions><|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content or '' }}"
    "{% if loop.last %}{{ eos_token }}{% else %}<|im_end|>\n{% endif %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.role == 'system' %} <functions></functions>{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    + PROMPT + "<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
SEED = tuple(f"<seed:bos>{role}\n" for role in ("system", "user", "assistant"))
END_OF_TEXT = "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"

FAMILIES = {
    "qwen2.5": Family(
        chatml("{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"),
        IM, "A1<|im_end|>", "<|im_end|>", "<tool_call> </tool_call>",
    ),
    "qwen3": Family(
        chatml(LAST_USER, said=QWEN3_SAID), IM, "<think>\n\n</think>\n\nA1<|im_end|>", "<|im_end|>",
        "<think> </think> <tool_call> </tool_call>", rewrites=True,
    ),
    "qwen3-2507": Family(chatml(), IM, "A1<|im_end|>", "<|im_end|>", "<tool_call> </tool_call>"),
    "qwen3.5": Family(
        chatml(LAST_USER, said=QWEN35_SAID).replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"),
        IM, "\n</think>\n\nA1<|im_end|>", "<|im_end|>", "<think> </think>", rewrites=True,
    ),
    "qwen3.5-small": Family(
        chatml(LAST_USER, said=QWEN35_SAID).replace(
            "assistant\n{% endif %}", "assistant\n<think>\n{% if not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"
        ),
        IM, "A1<|im_end|>", "<|im_end|>", "<think> </think>", rewrites=True,
    ),
    "llama2": Family(
        ALTERNATE + "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] "
        "{% if loop.index0 == 1 and messages[0].role == 'system' %}<<SYS>>\n{{ messages[0].content }}\n<</SYS>>\n\n"
        "{% endif %}{{ m.content.strip() }} [/INST]{% elif m.role == 'assistant' %} {{ m.content.strip() }} "
        "{{ eos_token }}{% endif %}{% endfor %}", "<s> </s>", " A1 </s>", "</s>", eos="</s>", bos="<s>",
    ),
    "llama3": Family(
        plain(*HEADERS, "<|eot_id|>", "{{ bos_token }}", content="m.content | trim"), LLAMA_TOKENS, "A1<|eot_id|>",
        "<|eot_id|>", eos="<|end_of_text|>", bos="<|begin_of_text|>",
    ),
    "llama3.1": Family(
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
        "<|end_header_id|>\n\n{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}"
        "{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}" + PROMPT + HEADERS[2] + "{% endif %}",
        LLAMA_TOKENS, "A1<|eot_id|>", "<|eot_id|>", eos="<|end_of_text|>", bos="<|begin_of_text|>",
    ),
    "llama4": Family(
        plain(*(f"<|header_start|>{role}<|header_end|>\n\n" for role in ("system", "user", "assistant")), "<|eot|>",
              "{{ bos_token }}"), "<|begin_of_text|> <|header_start|> <|header_end|> <|eot|> <|eom|>", "A1<|eot|>",
        "<|eot|>", bos="<|begin_of_text|>",
    ),
    "mistral-v1": Family(
        ALTERNATE + MISTRAL % ("", " ", " ", "{{ raise_exception('no system') }}", ""), INST, "A1</s>", "</s>",
        eos="</s>", bos="<s>",
    ),
    "mistral-v3": Family(MISTRAL % ("", " ", "", "", " "), INST, " A1</s>", "</s>", eos="</s>", bos="<s>"),
    "mistral-small-3": Family(
        MISTRAL % ("", "", "", "[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]", ""),
        INST + " [SYSTEM_PROMPT] [/SYSTEM_PROMPT]", "A1</s>", "</s>", eos="</s>", bos="<s>",
    ),
    "gemma2": Family(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + ALTERNATE + GEMMA,
        GEMMA_TOKENS, "A1<end_of_turn>", "<end_of_turn>", "\n\n <table>", "<eos>", "<bos>",
    ),
    "gemma3": Family(
        ALTERNATE + GEMMA.replace("user\n", "user\n{% if loop.index0 == 1 and messages[0].role == 'system' %}"
                      "{{ messages[0].content }}\n\n{% endif %}").replace("{{ m.content | trim }}<end_of_turn>\n", "", 1),
        GEMMA_TOKENS, "A1<end_of_turn>", "<end_of_turn>", "\n\n <table>", "<eos>", "<bos>",
    ),
    "gemma4": Family(
        GEMMA4, "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|tool_call> <tool_call|>", "A1<turn|>", "<turn|>",
        eos="<eos>", bos="<bos>",
    ),
    "phi3": Family(plain(*PHI, "<|end|>", after="\n") + END_OF_TEXT, PHI_TOKENS, "A1<|end|>", "<|end|>"),
    "phi4": Family(
        plain(*(f"<|im_start|>{role}<|im_sep|>" for role in ("system", "user", "assistant")), "<|im_end|>"),
        IM + " <|im_sep|>", "A1<|im_end|>", "<|im_end|>",
    ),
    "phi4-mini": Family(
        plain(*(f"<|{role}|>" for role in ("system", "user", "assistant")), "<|end|>") + END_OF_TEXT, PHI_TOKENS,
        "A1<|end|>", "<|end|>",
    ),
    "glm4": Family(
        plain("<|system|>\n", "<|user|>\n", "<|assistant|>\n", "", "[gMASK]<sop>").replace("assistant|>\n{% e", "assistant|>{% e"),
        GLM_TOKENS, "\nA1<|user|>", "<|user|>",
    ),
    "glm4.5": Family(
        GLM, GLM_TOKENS, "\n<think></think>\nA1<|user|>", "<|user|> <|observation|>",
        "<think> </think> <tool_call> </tool_call>",
    ),
    "deepseek-v3": Family(
        deepseek("", drops=False), f"{DEEPSEEK_ENDS} {DEEPSEEK_CALLS}", "A1<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>",
    ),
    "deepseek-v3.1": Family(
        deepseek("</think>", "</think>"), f"{DEEPSEEK_ENDS} {DEEPSEEK_CALLS}", "A1<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>", "<think> </think>", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>",
    ),
    "deepseek-r1-distill": Family(
        deepseek("<think>\n"), f"{DEEPSEEK_ENDS} {DEEPSEEK_CALLS}", "A1<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
        "<think> </think>", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>",
    ),
    "gpt-oss": Family(
        GPT_OSS, "<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|>",
        "<|channel|>final<|message|>A1<|return|>", "<|return|> <|call|>",
    ),
    "nemotron-nano-2": Family(
        NANO2, "<SPECIAL_10> <SPECIAL_11> <SPECIAL_12>", "A1\n<SPECIAL_12>", "<SPECIAL_12>", "<think> </think>",
        rewrites=True,
    ),
    "nemotron-3": Family(
        chatml("{% if messages[0].role != 'system' %}<|im_start|>system\n<|im_end|>\n{% endif %}" + LAST_USER,
               said=NEMOTRON3_SAID).replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"),
        IM, "</think>A1<|im_end|>", "<|im_end|>", "<think> </think>",
    ),
    "command-r": Family(
        plain(*COHERE, "<|END_OF_TURN_TOKEN|>", "{{ bos_token }}"), COHERE_TOKENS, "A1<|END_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>",
    ),
    "command-r7b": Family(
        plain(*COHERE[:2], COHERE[2] + "<|START_RESPONSE|>", "<|END_OF_TURN_TOKEN|>", "{{ bos_token }}").replace(
            "<|START_RESPONSE|>{{ m.content }}", "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"),
        COHERE_TOKENS, "A1<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>",
    ),
    "kimi-k2": Family(KIMI, KIMI_TOKENS, "A1<|im_end|>", "<|im_end|>", eos="[EOS]"),
    "minimax-m2": Family(
        MINIMAX, "]~!b[ ]~b] [e~[", "A1[e~[", "[e~[", "<think> </think>",
    ),
    "seed-oss": Family(
        plain(*SEED, "<seed:eos>"), "<seed:bos> <seed:eos> <seed:pad>", "A1<seed:eos>", "<seed:eos>", eos="<seed:eos>",
        bos="<seed:bos>",
    ),
    "apertus": Family(
        APERTUS, "<s> </s> <|system_start|> <|system_end|> <|user_start|> <|user_end|> <|assistant_start|> <|assistant_end|>",
        "A1<|assistant_end|>", "<|assistant_end|>", eos="</s>", bos="<s>",
    ),
    "olmo2": Family(OLMO2, "<|endoftext|>", "A1<|endoftext|>", "<|endoftext|>", bos="<|endoftext|>"),
    "olmo3": Family(OLMO3, IM + " <|pad|>", "A1<|endoftext|>", "<|endoftext|>"),
    "smollm3": Family(SMOLLM3, IM, "A1<|im_end|>", "<|im_end|>", "<think> </think>"),
    "granite3": Family(
        plain(*(f"<|start_of_role|>{role}<|end_of_role|>" for role in ("system", "user", "assistant")), "<|end_of_text|>",
              after="\n"), "<|start_of_role|> <|end_of_role|> <|end_of_text|>", "A1<|end_of_text|>", "<|end_of_text|>",
        eos="<|end_of_text|>",
    ),
    "lfm2": Family(chatml("{{ bos_token }}", tool=False), IM + " <|startoftext|>", "A1<|im_end|>", "<|im_end|>", bos="<|startoftext|>"),
    "exaone3.5": Family(
        plain("[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]", after="\n"), "[|endofturn|]",
        "A1[|endofturn|]", "[|endofturn|]", "[|system|] [|user|] [|assistant|]", "[|endofturn|]",
    ),
    "zephyr": Family(plain(*PHI, "{{ eos_token }}", after="\n"), "<s> </s>", "A1</s>", "</s>", eos="</s>", bos="<s>"),
    "vicuna": Family(
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }} {% elif m.role == 'user' %}USER: {{ m.content }} "
        "{% else %}ASSISTANT: {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}" + PROMPT + "ASSISTANT:{% endif %}",
        "<s> </s>", " A1</s>", "</s>", eos="</s>", bos="<s>",
    ),
    "hunyuan": Family(HUNYUAN, "<|startoftext|> <|extra_0|> <|extra_4|> <|eos|>", "A1<|eos|>", "<|eos|>", eos="<|eos|>"),
    "alpaca": Family(
        plain("{{ '' }}", "### Instruction:\n", "### Response:\n", "\n\n"), "", "A1\n\n", "",
    ),
    "chatml-with-marks": Family(
        chatml(tool=False).replace("{{ m.content or '' }}<|im_end|>", "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}", 1),
        IM, "A1<|im_end|>", "<|im_end|>",
    ),
}  # fmt: skip
