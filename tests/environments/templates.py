"""Chat templates with the habits of real ones."""

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_THINKING = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")

QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}
{{- '\\n<tool_call>{"name": ...}</tool_call><|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
  {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
  {%- set thought = '' %}
  {%- if '</think>' in message.content %}
    {%- set thought = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
  {%- endif %}
  {%- if (loop.index0 > ns.last or preserve_thinking) and (loop.last or thought) %}
    {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content }}
  {%- else %}{{- '<|im_start|>assistant\\n' + content }}{% endif %}
  {{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
  {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
  {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
  {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""Removes the thinking before the last message of the user, but keeps it between tool calls. Its switch is real too."""
QWEN3_WITHOUT_SWITCH = QWEN3.replace(" or preserve_thinking", "")

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{{ message.tool_calls[0].function | tojson }}<|eot_id|>"
    "{% else %}"
    "<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{% elif message.role == 'tool' %}"
    "{% if loop.first or not (messages[loop.index0 - 1].tool_calls or messages[loop.index0 - 1].role == 'tool') %}"
    "{{ raise_exception('no call') }}{% endif %}"
    "{% if message.tool_call_id is undefined or message.tool_call_id | length != 9 %}"
    "{{ raise_exception('no id') }}{% endif %}[TOOL_RESULTS] {{ message.content }}[/TOOL_RESULTS]"
    "{% elif message.tool_calls %}[TOOL_CALLS] {{ message.tool_calls[0].function | tojson }}{{ eos_token }}"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Refuses the result of a tool that was not called."""

SYSTEM_LAST = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if loop.last %}Be brief. {% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Moves a sentence to the last message."""
