"""Chat templates in the shapes that checkpoints bring: how each reads contents, calls, ids, null and reasoning.

Written here after the models they are named for, and cut to what they do with messages.
"""

from typing import NamedTuple

NINE = "{% if id is not defined or id | length != 9 %}{{ raise_exception('Tool call IDs must have length 9!') }}{% endif %}"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
IM = "<|im_start|>{{ m.role }}\n"


class Shape(NamedTuple):
    """`reads`: the flags that are true of its `TemplateReads`. `tools`: it writes calls and results."""

    source: str
    reads: set[str]
    tools: bool = False


STRINGS, PARTS, BOTH = {"strings"}, {"parts"}, {"parts", "strings"}
SHAPES = {
    "chatml": Shape("{% for m in messages %}" + IM + "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + ASKS, STRINGS),
    "llama 2": Shape(
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}"
        "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
        "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
        "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' </s>' }}{% endif %}{% endfor %}",
        STRINGS,
    ),
    "llama 3.1": Shape(
        "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}"
        "{%- else %}{%- set system_message = '' %}{%- endif %}<|system|>{{ system_message }}{%- for message in messages %}"
        "{%- if not (message.role == 'tool' or 'tool_calls' in message) %}<|{{ message.role }}|>{{ message['content'] | trim }}<|eot_id|>"
        "{%- elif 'tool_calls' in message %}{%- if not message.tool_calls | length == 1 %}{{ raise_exception('one call at once') }}{%- endif %}"
        '{%- set tool_call = message.tool_calls[0].function %}<|assistant|>{"name": "{{ tool_call.name }}", "parameters": {{ tool_call.arguments | tojson }}}<|eot_id|>'
        "{%- else %}<|ipython|>{% if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}<|eot_id|>"
        "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{%- endif %}",
        STRINGS | {"one_call"},
        tools=True,
    ),
    "llama 3.2 vision": Shape(
        "{% set ns = namespace(has_images=false) %}{% for message in messages %}{% for content in message['content'] %}"
        "{% if content['type'] == 'image' %}{% set ns.has_images = true %}{% endif %}{% endfor %}{% endfor %}"
        "{% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] | trim %}{% set messages = messages[1:] %}{% endif %}"
        "{{ '<|system|>' + (system_message or '') }}{% for message in messages %}<|{{ message.role }}|>"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
        "{% if content['type'] == 'image' %}<|image|>{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        BOTH,
    ),
    "llama guard 3 1b": Shape(
        "Task{% for message in messages %}{% if message['role'] == 'user' %}{% set role = 'User' %}{% else %}{% set role = 'Agent' %}{% endif %}"
        "{{ '\n\n' + role + ': ' }}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] | trim }}{% endfor %}{% endfor %}",
        PARTS,
    ),
    "llama 4": Shape(
        "{% for message in messages %}{{ '<|header_start|>' + message['role'] + '<|header_end|>\n\n' }}{% if message['content'] is string %}{{ message['content'] | trim }}"
        "{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}<|image|>{% elif content['type'] == 'text' %}{{ content['text'] | trim }}"
        "{% endif %}{% endfor %}{% endif %}{% if 'tool_calls' in message %}<|python_start|>{% for call in message.tool_calls %}{{ call.function.name }}("
        "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}{% endfor %}){% endfor %}<|python_end|>{% endif %}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}",
        BOTH,
        tools=True,
    ),
    "llava 1.5": Shape(
        "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
        "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
        "{% if message['role'] != 'assistant' %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}{% endfor %}"
        "{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{% generation %}{{ content['text'] + ' ' }}{% endgeneration %}{% endfor %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
        PARTS,
    ),
    "smolvlm": Shape(
        "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
        "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
        PARTS,
    ),
    "qwen2-vl": Shape(
        "{% set image_count = namespace(value=0) %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
        "{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content %}{% set image_count.value = image_count.value + 1 %}<|image_pad|>"
        "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
        + ASKS,
        BOTH,
    ),
    "qwen 2.5": Shape(
        "{%- for message in messages %}{%- if message.role == 'user' or message.role == 'system' or (message.role == 'assistant' and not message.tool_calls) %}"
        "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{%- elif message.role == 'assistant' %}{{- '<|im_start|>' + message.role }}"
        "{%- if message.content %}{{- '\n' + message.content }}{%- endif %}{%- for tool_call in message.tool_calls %}{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}"
        "{{- '\n<tool_call>\n{\"name\": \"' + tool_call.name + '\", \"arguments\": ' }}{{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
        "{%- elif message.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
        STRINGS,
        tools=True,
    ),
    "qwen 3": Shape(
        "{%- for message in messages %}{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}"
        "{%- if message.role == 'assistant' %}{%- set reasoning_content = '' %}{%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}"
        "{%- elif '</think>' in content %}{%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{{- '<|im_start|>assistant\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
        '{%- for tool_call in message.tool_calls or [] %}{%- set tool_call = tool_call.function %}{{- \'\n<tool_call>\n{"name": "\' ~ tool_call.name ~ \'", "arguments": \' }}'
        "{%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
        "{%- else %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
        STRINGS,
        tools=True,
    ),
    "qwen 3 coder": Shape(
        "{%- macro render_item(item) %}{{- item }}{%- endmacro %}{%- for message in messages %}{%- if message.role == 'assistant' and message.tool_calls is defined and message.tool_calls is iterable and message.tool_calls | length > 0 %}"
        "{{- '<|im_start|>' + message.role }}{%- if message.content is defined and message.content is string and message.content | trim | length > 0 %}{{- '\n' + message.content | trim + '\n' }}{%- endif %}"
        "{%- for tool_call in message.tool_calls %}{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}"
        "{%- if tool_call.arguments is defined %}{%- for args_name, args_value in tool_call.arguments | items %}{{- '<parameter=' + args_name + '>\n' }}{{- render_item(args_value) }}{{- '\n</parameter>\n' }}{%- endfor %}{%- endif %}"
        "{{- '</function>\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
        STRINGS,
        tools=True,
    ),
    "qwen 3.5": Shape(
        "{%- macro render_content(content, do_vision_count) %}{%- if content is string %}{{- content }}{%- elif content is iterable and content is not mapping %}{%- for item in content %}"
        "{%- if 'image' in item or item.type == 'image' %}<|image_pad|>{%- elif 'text' in item %}{{- item.text }}{%- else %}{{- raise_exception('Unexpected item') }}{%- endif %}{%- endfor %}"
        "{%- elif content is none or content is undefined %}{{- '' }}{%- endif %}{%- endmacro %}{%- for message in messages %}{%- set content = render_content(message.content, true) | trim %}"
        "{{- '<|im_start|>' + message.role + '\n' }}{%- if message.role == 'assistant' and message.reasoning_content %}{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}{{- content }}"
        "{%- for tool_call in message.tool_calls or [] %}{{- '<function=' + tool_call.function.name + '>' }}{%- for name, value in tool_call.function.arguments | items %}{{- name ~ value }}{%- endfor %}{%- endfor %}"
        "{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
        BOTH | {"null"},
        tools=True,
    ),
    "gemma 3": Shape(
        "{%- if messages[0]['role'] == 'system' -%}{%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\n\n' -%}{%- else -%}{%- set prefix = messages[0]['content'][0]['text'] + '\n\n' -%}"
        "{%- endif -%}{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}{%- for message in loop_messages -%}"
        "{{ '<start_of_turn>' + message['role'] + '\n' + (prefix if loop.first else '') }}{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- elif message['content'] is iterable -%}"
        "{%- for item in message['content'] -%}{%- if item['type'] == 'image' -%}<start_of_image>{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}"
        "{%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}",
        BOTH,
    ),
    "mistral 7b v0.3": Shape(
        "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}"
        "{%- for message in loop_messages %}{%- if message['role'] == 'user' %}{{- '[INST] ' + (system_message + '\n\n' if system_message is defined and loop.first else '') + message['content'] + '[/INST]' }}"
        "{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function | tojson %}{{- out[:-1] }}"
        "{%- set id = tool_call.id %}"
        + NINE
        + "{{- ', \"id\": \"' + tool_call.id + '\"}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']</s>' }}{%- endif %}{%- endfor %}"
        "{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] | trim + '</s>' }}{%- elif message['role'] == 'tool' %}{%- if message.content is defined and message.content.content is defined %}"
        "{%- set content = message.content.content %}{%- else %}{%- set content = message.content %}{%- endif %}{{- '[TOOL_RESULTS] {\"content\": ' + content | string + ', ' }}"
        "{%- set id = message.tool_call_id %}"
        + NINE
        + "{{- '\"call_id\": \"' + message.tool_call_id + '\"}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}",
        STRINGS | {"short_ids"},
        tools=True,
    ),
    "mistral small 3.1": Shape(
        "{%- if messages[0]['role'] == 'system' %}{%- if messages[0]['content'] is string %}{%- set system_message = messages[0]['content'] %}{%- else %}{%- set system_message = messages[0]['content'][0]['text'] %}{%- endif %}"
        "{%- set loop_messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- set loop_messages = messages %}{%- endif %}{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}"
        "{%- for message in loop_messages %}{%- if message['role'] == 'user' %}{%- if message['content'] is string %}{{- '[INST]' + message['content'] + '[/INST]' }}{%- else %}{{- '[INST]' }}"
        "{%- for block in message['content'] %}{%- if block['type'] == 'text' %}{{- block['text'] }}{%- elif block['type'] in ['image', 'image_url'] %}{{- '[IMG]' }}{%- endif %}{%- endfor %}{{- '[/INST]' }}{%- endif %}"
        "{%- elif message['role'] == 'assistant' %}{%- if message['content'] is string %}{{- message['content'] + '</s>' }}{%- else %}{{- message['content'][0]['text'] + '</s>' }}{%- endif %}{%- endif %}{%- endfor %}",
        BOTH,
    ),
    "phi 4 mini": Shape(
        "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}"
        "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        STRINGS,
    ),
    "deepseek v3": Shape(
        "{%- set ns = namespace(is_first=false, is_output_first=true) %}{%- for message in messages %}{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}"
        "{%- if message['role'] == 'assistant' and message['content'] is none %}{%- set ns.is_first = false %}{%- for tool in message['tool_calls'] %}{{ '<｜Assistant｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\n```json\n' + tool['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}"
        "{%- endfor %}{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- if message['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}{%- endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
        STRINGS | {"null", "calls_beside_null"},
        tools=True,
    ),
    "deepseek v3.1": Shape(
        "{%- for message in messages %}{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}{%- if message['role'] == 'assistant' %}{{ '<｜Assistant｜></think>' }}{%- set content = message['content'] or '' %}"
        "{%- if '</think>' in content %}{%- set content = content.split('</think>', 1)[1] %}{%- endif %}{{ content }}{%- if message['tool_calls'] is defined and message['tool_calls'] is not none %}{%- for tool in message['tool_calls'] %}"
        "{{ '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}{%- endfor %}{%- endif %}{{ '<｜end▁of▁sentence｜>' }}{%- endif %}"
        "{%- if message['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}{%- endfor %}",
        STRINGS,
        tools=True,
    ),
    "glm 4.5": Shape(
        "{%- macro visible_text(content) -%}{%- if content is string -%}{{- content }}{%- elif content is iterable and content is not mapping -%}{%- for item in content -%}{%- if item is mapping and item.type == 'text' -%}{{- item.text }}"
        "{%- elif item is string -%}{{- item }}{%- endif -%}{%- endfor -%}{%- else -%}{{- content }}{%- endif -%}{%- endmacro -%}{% for m in messages %}{%- if m.role == 'user' -%}<|user|>\n{{ visible_text(m.content) }}"
        "{%- elif m.role == 'assistant' -%}<|assistant|>{%- set reasoning_content = '' %}{%- set content = visible_text(m.content) %}{%- if m.reasoning_content is string %}{%- set reasoning_content = m.reasoning_content %}{%- endif %}"
        "{{ '\n<think>' + reasoning_content.strip() + '</think>' }}{%- if content.strip() -%}{{ '\n' + content.strip() }}{%- endif -%}{% if m.tool_calls %}{% for tc in m.tool_calls %}{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}"
        "{{ '\n<tool_call>' + tc.name }}{% set _args = tc.arguments %}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson if v is not string else v }}</arg_value>{% endfor %}</tool_call>{% endfor %}{% endif %}"
        "{%- elif m.role == 'tool' -%}{%- if m.content is string -%}{{- '<|observation|><tool_response>' + m.content + '</tool_response>' }}{%- else -%}<|observation|>{% for tr in m.content %}<tool_response>{{ tr.output if tr.output is defined else tr }}</tool_response>{% endfor -%}{% endif -%}"
        "{%- elif m.role == 'system' -%}<|system|>\n{{ visible_text(m.content) }}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}",
        BOTH,
        tools=True,
    ),
    "kimi k2": Shape(
        "{%- for message in messages %}<|im_{{ message['role'] }}|>{{ message.get('name') or message['role'] }}<|im_middle|>{%- if message['role'] == 'assistant' and message.get('tool_calls') -%}{%- if message['content'] -%}{{ message['content'] }}{%- endif -%}"
        "<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] -%}<|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>{% if tool_call['function']['arguments'] is string %}{{ tool_call['function']['arguments'] }}"
        "{% else %}{{ tool_call['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>{%- endfor -%}<|tool_calls_section_end|>{%- elif message['role'] == 'tool' -%}## Return of {{ message.tool_call_id }}\n{{ message['content'] }}"
        "{%- elif message['content'] is string -%}{{ message['content'] }}{%- else -%}{%- for content in message['content'] -%}{% if content['type'] == 'image' or 'image' in content %}<|media_pad|>{% else %}{{ content['text'] }}{% endif %}{%- endfor -%}{%- endif -%}<|im_end|>{%- endfor %}"
        "{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{%- endif %}",
        BOTH,
        tools=True,
    ),
    "gpt-oss": Shape(
        "{%- set last_tool_call = namespace(name=none) %}{%- for message in messages %}{%- if message.role == 'assistant' %}{%- if 'content' in message %}{%- if '<|channel|>' in message.content %}{{ raise_exception('channel tags in content') }}{%- endif %}{%- endif %}"
        "{%- if 'tool_calls' in message %}{%- set tool_call = message.tool_calls[0] %}{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}{%- if message.content and message.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}"
        "{%- elif message.content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}{%- elif message.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}"
        "{{- '<|start|>assistant to=functions.' + tool_call.name + '<|channel|>commentary json<|message|>' }}{{- tool_call.arguments | tojson }}{{- '<|call|>' }}{%- set last_tool_call.name = tool_call.name %}"
        "{%- elif loop.last and not add_generation_prompt %}{%- if 'thinking' in message %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}"
        "{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- set last_tool_call.name = none %}{%- endif %}"
        "{%- elif message.role == 'tool' -%}{%- if last_tool_call.name is none %}{{ raise_exception('a result, but no call before it') }}{%- endif %}{{- '<|start|>functions.' + last_tool_call.name }}{{- ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}"
        "{%- elif message.role == 'user' -%}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}",
        STRINGS | {"one_call"},
        tools=True,
    ),
    "an alias": Shape(
        "{% for message in messages %}{% set content = message['content'] %}{{ message.role }}: {% if content is string %}{{ content }}{% else %}{% for part in content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}\n{% endfor %}",
        BOTH,
    ),
    "a namespace": Shape(
        "{% set ns = namespace(content='') %}{% for message in messages %}{% set ns.content = message.get('content') %}{% for part in ns.content %}{{ part.get('text') }}{% endfor %}\n{% endfor %}",
        PARTS,
    ),
    "filters alone": Shape(
        "{% for m in messages %}{{ m.role }}: {{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('') }}\n{% endfor %}",
        PARTS,
    ),
    "places": Shape(
        "{% for i in range(messages | length) %}{% for j in range(messages[i].content | length) %}{{ messages[i].content[j]['text'] }}{% endfor %}\n{% endfor %}",
        PARTS,
    ),
    "an expression": Shape(
        "{% for m in messages %}{{ m.content if m.content is string else m.content | map(attribute='text') | join('') }}\n{% endfor %}",
        BOTH,
    ),
    "a macro by name": Shape(
        "{% macro show(parts) %}{% for item in parts | reverse | list | reverse %}{{ item.text }}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(parts=m.content) }}\n{% endfor %}",
        PARTS,
    ),
    "loops over other lists": Shape(
        "{% for m in messages %}{% for line in m.content.split('\n') %}{{ line }}{% endfor %}{% for tool in tools or [] %}{{ tool.text }}{% endfor %}{% for d in documents or [] %}{{ d['text'] }}{% endfor %}\n{% endfor %}",
        STRINGS,
    ),
}
