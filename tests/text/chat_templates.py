"""Chat templates in the shapes that checkpoints bring: how each reads contents, calls, ids, null and reasoning.

Code of our own: a shape reads messages as the template of the model it is named for, and does little else.
"""

from typing import NamedTuple

IM = "<|im_start|>{{ m.role }}\n"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
NINE = "{% if key | length != 9 %}{{ raise_exception('An id has nine letters and digits.') }}{% endif %}"
RULES = (
    "{% set turns = messages %}{% if messages[0].role == 'system' %}"
    "{% set turns = messages[1:] %}{% set rules = messages[0]['content'] %}{% endif %}"
)
JSON_CALL = '<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ ARGUMENTS }}}\n</tool_call>'


class Shape(NamedTuple):
    """`reads`: the flags that are true of its `TemplateReads`. `tools`: it writes calls and results."""

    source: str
    reads: set[str]
    tools: bool = False


STRINGS, PARTS, BOTH = {"strings"}, {"parts"}, {"parts", "strings"}
SHAPES = {
    "chatml": Shape("{% for m in messages %}" + IM + "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + ASKS, STRINGS),
    "llama 2": Shape(RULES + "{% for turn in turns %}{% set said = turn['content'] %}"
        "{% if rules and loop.first %}{% set said = '<<SYS>>\n' + rules + '\n<</SYS>>\n\n' + said %}{% endif %}"
        "{% if turn.role == 'assistant' %}{{ ' ' + said.strip() + ' </s>' }}"
        "{% elif turn.role == 'user' %}{{ '[INST] ' + said.strip() + ' [/INST]' }}{% endif %}{% endfor %}", STRINGS),
    "llama 3.1": Shape(
        "{% set rules = '' %}{% if messages[0].role == 'system' %}{% set rules = messages[0].content | trim %}"
        "{% set messages = messages[1:] %}{% endif %}<|system|>{{ rules }}{% for m in messages %}"
        "{% if 'tool_calls' in m %}{% set made = m.tool_calls[0]['function'] %}"
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('A turn makes one call.') }}{% endif %}"
        '<|assistant|>{"name": "{{ made.name }}", "parameters": {{ made.arguments | tojson }}}'
        "{% elif m.role == 'tool' %}<|ipython|>{{ m.content | tojson if m.content is iterable else m.content }}"
        "{% else %}<|{{ m.role }}|>{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        STRINGS | {"one_call"},
        tools=True,
    ),
    "llama 3.2 vision": Shape(
        "{% set seen = namespace(image=false) %}{% for m in messages %}{% for p in m['content'] %}"
        "{% if p['type'] == 'image' %}{% set seen.image = true %}{% endif %}{% endfor %}{% endfor %}"
        "{% if messages[0].role == 'system' %}{% set rules = messages[0].content | trim %}"
        "{% set messages = messages[1:] %}{% endif %}<|system|>{{ rules or '' }}"
        "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m['content'] %}{{ p['text'] if p['type'] == 'text' else '<|image|>' if p['type'] == 'image' }}"
        "{% endfor %}{% endif %}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        BOTH,
    ),
    "llama guard 3 1b": Shape(
        "Task{% for m in messages %}{{ '\n\n' ~ ('User' if m.role == 'user' else 'Agent') ~ ': ' }}"
        "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p.text | trim }}{% endfor %}"
        "{% endfor %}",
        PARTS,
    ),
    "llama 4": Shape("{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>\n\n"
        "{% if m.content is string %}{{ m.content | trim }}{% else %}"
        "{% for p in m.content %}{{ p.text | trim if p.type == 'text' else '<|image|>' if p.type == 'image' }}"
        "{% endfor %}{% endif %}"
        "{% if 'tool_calls' in m %}<|python_start|>{% for call in m.tool_calls %}{% set made = call.function %}"
        "{{ made.name }}({% for key, given in made.arguments.items() %}{{ key }}={{ given | tojson }}{% endfor %})"
        "{% endfor %}<|python_end|>{% endif %}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}", BOTH, tools=True),
    "llava 1.5": Shape("{% for m in messages %}{{ m.role.upper() + ': ' if m.role != 'system' else '' }}"
        "{% for p in m.content | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
        "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ p.text + ' ' }}{% endgeneration %}{% else %}{{ p.text + ' ' }}{% endif %}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}", PARTS),
    "smolvlm": Shape("<|im_start|>{% for m in messages %}"
        "{{ m.role | capitalize + (':' if m.content[0]['type'] == 'image' else ': ') }}"
        "{% for p in m.content %}{{ p['text'] if p['type'] == 'text' else '<image>' if p['type'] == 'image' }}"
        "{% endfor %}" "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}", PARTS),
    "qwen2-vl": Shape("{% set images = namespace(n=0) %}{% for m in messages %}" + IM +
        "{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{% if 'text' in p %}{{ p['text'] }}"
        "{% elif 'image' in p or p.type == 'image' %}{% set images.n = images.n + 1 %}<|image_pad|>{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}" + ASKS, BOTH),
    "qwen 2.5": Shape("{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n"
        "{{ '<tool_response>\n' + m.content + '\n</tool_response>' }}{% elif m.tool_calls %}<|im_start|>{{ m.role }}"
        "{% if m.content %}{{ '\n' + m.content }}{% endif %}{% for call in m.tool_calls %}"
        "{% if call.function is defined %}{% set call = call.function %}{% endif %}{{ '\n' }}" +
        JSON_CALL.replace("ARGUMENTS", "call.arguments | tojson") +
        "{% endfor %}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endif %}<|im_end|>\n{% endfor %}" +
        ASKS, STRINGS, tools=True),
    "qwen 3": Shape("{% for m in messages %}{% set said = '' %}{% set thought = '' %}"
        "{% if m.content is string %}{% set said = m.content %}{% endif %}" + IM + "{% if m.role == 'assistant' %}"
        "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
        "{% elif '</think>' in said %}{% set halves = said.split('</think>') %}"
        "{% set thought = halves[0] | replace('<think>', '') %}{% set said = halves[-1] %}{% endif %}"
        "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + said.lstrip('\n') }}"
        "{% for call in m.tool_calls or [] %}{% set call = call.function %}{{ '\n' }}" +
        JSON_CALL.replace("ARGUMENTS", "call.arguments if call.arguments is string else call.arguments | tojson") +
        "{% endfor %}{% else %}{{ said }}{% endif %}<|im_end|>\n{% endfor %}" + ASKS, STRINGS, tools=True),
    "qwen 3 coder": Shape(
        "{% macro shown(given) %}{{ given }}{% endmacro %}{% for m in messages %}<|im_start|>{{ m.role }}"
        "{% if m.role == 'assistant' and m.tool_calls is iterable and m.tool_calls | length %}"
        "{% if m.content is string and m.content | trim %}{{ '\n' + m.content | trim + '\n' }}{% endif %}"
        "{% for call in m.tool_calls %}{% if call.function is defined %}{% set call = call.function %}{% endif %}"
        "{{ '\n<tool_call>\n<function=' + call.name + '>\n' }}{% for key, given in call.arguments | items %}"
        "<parameter={{ key }}>\n{{ shown(given) }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
        "{% else %}{{ '\n' + m.content }}{% endif %}<|im_end|>\n{% endfor %}" + ASKS,
        STRINGS,
        tools=True,
    ),
    "qwen 3.5": Shape("{% macro shown(given, counts) %}{% if given is none or given is undefined %}"
        "{% elif given is string %}{{ given }}{% else %}{% for p in given %}{% if 'text' in p %}{{ p.text }}"
        "{% elif 'image' in p or p.type == 'image' %}<|image_pad|>"
        "{% else %}{{ raise_exception('A part is a text or an image.') }}{% endif %}{% endfor %}{% endif %}"
        "{% endmacro %}{% for m in messages %}{% set said = shown(m.content, true) | trim %}" + IM +
        "{% if m.role == 'assistant' and m.reasoning_content %}"
        "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ said }}"
        "{% for call in m.tool_calls or [] %}<function={{ call.function.name }}>"
        "{% for key, given in call.function.arguments | items %}{{ key ~ given }}{% endfor %}{% endfor %}"
        "<|im_end|>\n{% endfor %}" + ASKS, BOTH | {"null"}, tools=True),
    "gemma 3": Shape(RULES + "{% if rules %}{% if rules is string %}{% set lead = rules %}"
        "{% else %}{% set lead = rules[0]['text'] %}{% endif %}{% endif %}"
        "{% for m in turns %}<start_of_turn>{{ m.role + '\n' + (lead + '\n\n' if lead and loop.first else '') }}"
        "{% if m.content is string %}{{ m.content | trim }}{% elif m.content is iterable %}{% for p in m.content %}"
        "{{ p['text'] | trim if p['type'] == 'text' else '<start_of_image>' if p['type'] == 'image' }}{% endfor %}"
        "{% else %}{{ raise_exception('Content is a text or parts.') }}{% endif %}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}", BOTH),
    "mistral 7b v0.3": Shape(RULES + "{% for m in turns %}{% if m.role == 'tool' %}{% set due = m.content %}"
        "{% if due.content is defined %}{% set due = due.content %}{% endif %}{% set key = m.tool_call_id %}" + NINE +
        '[TOOL_RESULTS] {"content": {{ due | string }}, "call_id": "{{ key }}"}[/TOOL_RESULTS]'
        "{% elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS] ["
        "{% for call in m.tool_calls %}{% set key = call.id %}" + NINE +
        "{% set made = call.function | tojson %}{{ made[:-1] + ', \"id\": \"' + key + '\"}' }}"
        "{{ ']</s>' if loop.last else ', ' }}{% endfor %}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + '</s>' }}{% elif m.role == 'user' %}"
        "[INST] {{ (rules + '\n\n' if rules and loop.first else '') + m.content }}[/INST]{% endif %}{% endfor %}",
        STRINGS | {"short_ids"}, tools=True),
    "mistral small 3.1": Shape(RULES +
        "{% if rules and rules is not string %}{% set rules = rules[0]['text'] %}{% endif %}"
        "[SYSTEM_PROMPT]{{ rules or '' }}[/SYSTEM_PROMPT]{% for m in turns %}{% if m.role == 'assistant' %}"
        "{% if m.content is not string %}{{ m.content[0]['text'] }}{% else %}{{ m.content }}{% endif %}</s>"
        "{% elif m.role == 'user' %}[INST]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p['type'] in ('image', 'image_url') %}[IMG]{% elif p['type'] == 'text' %}{{ p['text'] }}{% endif %}"
        "{% endfor %}{% endif %}[/INST]{% endif %}{% endfor %}", BOTH),
    "phi 4 mini": Shape("{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
        "{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}"
        "{{ '<|tool|>' + m['tools'] + '<|/tool|>' }}{% endif %}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}", STRINGS),
    "deepseek v3": Shape("{% set past = namespace(calls=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '<｜User｜>' + m['content'] }}{% elif m.role == 'tool' %}"
        "{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}{% endif %}"
        "{% if m.role == 'assistant' and m['content'] is none %}{% for call in m['tool_calls'] %}"
        "{% set past.calls = past.calls + 1 %}{% set made = call['function'] %}"
        "<｜Assistant｜><｜tool▁call▁begin｜>{{ call['type'] + '<｜tool▁sep｜>' + made['name'] }}\n"
        "{{ '```json\n' + made['arguments'] + '\n```' }}<｜tool▁call▁end｜>{% endfor %}{% elif m.role == 'assistant' %}"
        "{% set said = m['content'] %}"
        "{% if '</think>' in said %}{% set said = said.split('</think>') | last %}{% endif %}"
        "{{ '<｜Assistant｜>' + said + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}", STRINGS | {"null", "calls_beside_null"}, tools=True),
    "deepseek v3.1": Shape("{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}"
        "{% elif m.role == 'user' %}{{ '<｜User｜>' + m['content'] }}{% elif m.role == 'assistant' %}"
        "{% set said = m['content'] or '' %}"
        "{% if '</think>' in said %}{% set said = said.split('</think>', 1) | last %}{% endif %}"
        "<｜Assistant｜></think>{{ said }}{% if m.tool_calls is defined and m.tool_calls is not none %}"
        "{% for call in m.tool_calls %}{% set made = call['function'] %}<｜tool▁call▁begin｜>"
        "{{ made['name'] + '<｜tool▁sep｜>' + made['arguments'] }}<｜tool▁call▁end｜>{% endfor %}{% endif %}"
        "<｜end▁of▁sentence｜>{% endif %}{% endfor %}", STRINGS, tools=True),
    "glm 4.5": Shape("{% macro shown(given) %}{% if given is string %}{{ given }}{% elif given is mapping %}{{ given }}"
        "{% elif given is iterable %}{% for p in given %}"
        "{% if p is string %}{{ p }}{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
        "{% else %}{{ given }}{% endif %}{% endmacro %}"
        "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>"
        "{% if m.content is not string %}{% for p in m.content %}"
        "<tool_response>{{ p if p.output is undefined else p.output }}</tool_response>{% endfor %}"
        "{% else %}<tool_response>{{ m.content }}</tool_response>{% endif %}"
        "{% elif m.role == 'assistant' %}{% set said = shown(m.content).strip() %}{% set thought = '' %}"
        "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content.strip() %}{% endif %}"
        "{{ '<|assistant|>\n<think>' + thought + '</think>' + ('\n' + said if said else '') }}"
        "{% for call in m.tool_calls or [] %}{% if call.function %}{% set call = call.function %}{% endif %}"
        "{{ '\n<tool_call>' + call.name }}{% set all = call.arguments %}{% for key, given in all.items() %}"
        "<arg_key>{{ key }}</arg_key><arg_value>{{ given if given is string else given | tojson }}</arg_value>"
        "{% endfor %}</tool_call>{% endfor %}{% else %}<|{{ m.role }}|>\n{{ shown(m.content) }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}", BOTH, tools=True),
    "kimi k2": Shape("{% for m in messages %}<|im_{{ m['role'] }}|>{{ m.get('name') or m['role'] }}<|im_middle|>"
        "{% if m['role'] == 'tool' %}{{ m.tool_call_id }}:\n{{ m['content'] }}"
        "{% elif m['role'] == 'assistant' and m.get('tool_calls') %}{{ m['content'] or '' }}"
        "<|tool_calls_section_begin|>{% for call in m['tool_calls'] %}{% set given = call['function']['arguments'] %}"
        "<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>"
        "{{ given if given is string else given | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
        "{% elif m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
        "{% if 'image' in p or p['type'] == 'image' %}<|media_pad|>{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
        "{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}", BOTH, tools=True),
    "gpt-oss": Shape("{% macro on(channel, said, end='<|end|>') %}"
        "<|start|>assistant<|channel|>{{ channel }}<|message|>{{ said }}{{ end }}{% endmacro %}"
        "{% set open = namespace(call=none) %}{% for m in messages %}"
        "{% set ends = loop.last and not add_generation_prompt %}"
        "{% if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}"
        "{% elif m.role == 'tool' %}"
        "{% if open.call is none %}{{ raise_exception('No call awaits this result.') }}{% endif %}"
        "{{ '<|start|>functions.' + open.call + ' to=assistant' }}<|channel|>commentary<|message|>"
        "{{ m.content | tojson }}<|end|>{% elif m.role == 'assistant' %}"
        "{% if 'content' in m and '<|channel|>' in m.content %}{{ raise_exception('A channel in it.') }}{% endif %}"
        "{% if 'tool_calls' in m %}{% set call = m.tool_calls[0] %}"
        "{% if call.function %}{% set call = call.function %}{% endif %}{% set open.call = call.name %}"
        "{% if m.thinking and m.content %}{{ raise_exception('A call follows content or thinking, not both.') }}"
        "{% elif m.thinking %}{{ on('analysis', m.thinking) }}"
        "{% elif m.content %}{{ on('analysis', m.content) }}{% endif %}<|start|>assistant to=functions.{{ call.name }}"
        "<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>"
        "{% else %}{% set open.call = none %}"
        "{% if ends and 'thinking' in m %}{{ on('analysis', m.thinking) }}{% endif %}"
        "{{ on('final', m.content, '<|return|>' if ends else '<|end|>') }}{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}", STRINGS | {"one_call"}, tools=True),
    "an alias": Shape("{% for message in messages %}{% set content = message['content'] %}{{ message.role }}: "
        "{% if content is string %}{{ content }}{% else %}"
        "{% for part in content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}\n{% endfor %}", BOTH),
    "a namespace": Shape(
        "{% set ns = namespace(content='') %}{% for message in messages %}{% set ns.content = message.get('content') %}"
        "{% for part in ns.content %}{{ part.get('text') }}{% endfor %}\n{% endfor %}",
        PARTS,
    ),
    "filters alone": Shape("{% for m in messages %}{{ m.role }}: "
        "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('') }}\n{% endfor %}",
        PARTS),
    "places": Shape("{% for i in range(messages | length) %}{% for j in range(messages[i].content | length) %}"
        "{{ messages[i].content[j]['text'] }}{% endfor %}\n{% endfor %}", PARTS),
    "an expression": Shape("{% for m in messages %}"
        "{{ m.content if m.content is string else m.content | map(attribute='text') | join('') }}\n{% endfor %}", BOTH),
    "a macro by name": Shape("{% macro show(parts) %}"
        "{% for item in parts | reverse | list | reverse %}{{ item.text }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(parts=m.content) }}\n{% endfor %}", PARTS),
    "loops over other lists": Shape(
        "{% for m in messages %}{% for line in m.content.split('\n') %}{{ line }}{% endfor %}"
        "{% for tool in tools or [] %}{{ tool.text }}{% endfor %}"
        "{% for d in documents or [] %}{{ d['text'] }}{% endfor %}\n{% endfor %}",
        STRINGS,
    ),
}  # fmt: skip
