"""Small chat templates built from the constructs that published ones use, and what they make of a conversation."""

LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}{% set system_message = "" %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}{% for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n" }}{% endfor %}{% endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
            + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one tool call at a time") }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>tool<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{% endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == "user" and message.content is string and not
           (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.open = false %}{% set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '\\n<tool_call>{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{% else %}{{- call.arguments | tojson }}{% endif %}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first = "" -%}{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

MISTRAL = """{%- macro answer(text) %}{{ ' ' + text + eos_token }}{%- endmacro %}
{%- set users = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message["role"] == "user" %}
        {%- if message == users[-1] and messages[0].role == 'system' %}
            {{- "[INST] " + messages[0].content + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{% endif %}
    {%- elif message.role == "assistant" %}{{- answer(message.content) }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported, not " + message.role) }}{% endif %}
{%- endfor %}
"""

PHI3 = """{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'user' %}{{'<|user|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>
' + message['content'] + '<|end|>
'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}"""

DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(system='', tool=false) %}
{%- for message in messages %}{% if message['role'] == 'system' %}{% set ns.system = message['content'] %}
    {%- endif %}{% endfor %}
{{- bos_token }}{{- ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{% set ns.tool = false %}{{- '<｜User｜>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')|last %}{% endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.tool %}{{- '<｜Assistant｜>' }}{% endif %}
"""

GRANITE = """{%- for document in documents or [] %}{{- '[' ~ loop.index ~ '] ' ~ document.text ~ '\\n' }}{% endfor %}
{%- for message in messages %}
    {%- if message.content|length > 20 %}{{- 'long' }}{% break %}{% endif %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|end_of_text|>' }}{% endgeneration %}
    {%- else %}{{- message['content'] + '<|end_of_text|>' }}{% endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}
"""

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hello "},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi."}, {"role": "user", "content": "Who?"}]
CALLS = [{"role": "user", "content": "Rain?"},
         {"role": "assistant", "content": None, "tool_calls": [
             {"id": "1", "type": "function", "function": {"name": "rain", "arguments": '{"town": "Köln"}'}}]},
         {"role": "tool", "content": "no"}]
TOOLS = [{"type": "function", "function": {"name": "rain", "parameters": {"a": "<b>&'c'"}}}]

THOUGHT = "<think>\nhm\n</think>\n\nHi."
EXPECTED = {
    "LLAMA3": "<s><|start_header_id|>system<|end_header_id|>\n\nToday: 05 Mar 2024\n\nBe brief.<|eot_id|>"
              "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
              f"<|start_header_id|>assistant<|end_header_id|>\n\n{THOUGHT}<|eot_id|>"
              "<|start_header_id|>user<|end_header_id|>\n\nWho?<|eot_id|>"
              "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "QWEN3": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hello <|im_end|>\n"
             "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n",
    "GEMMA": "<s><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n"
             f"<start_of_turn>model\n{THOUGHT}<end_of_turn>\n<start_of_turn>user\nWho?<end_of_turn>\n"
             "<start_of_turn>model\n",
    "MISTRAL": f"<s>[INST]  Hello [/INST] {THOUGHT}</s>[INST] Be brief.\n\nWho?[/INST]",
    "PHI3": f"<|system|>\nBe brief.<|end|>\n<|user|>\n Hello <|end|>\n<|assistant|>\n{THOUGHT}<|end|>\n"
            "<|user|>\nWho?<|end|>\n<|assistant|>\n",
    "DEEPSEEK": "<s>Be brief.<｜User｜> Hello <｜Assistant｜>\n\nHi.<｜end▁of▁sentence｜><｜User｜>Who?<｜Assistant｜>",
    "GRANITE": "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n"
               "<|start_of_role|>user<|end_of_role|> Hello <|end_of_text|>\n"
               "long<|start_of_role|>assistant<|end_of_role|>",
}
EXPECTED_CALLS = {
    "LLAMA3": "<s><|start_header_id|>system<|end_header_id|>\n\nToday: 05 Mar 2024\n\n{\n"
              '    "type": "function",\n    "function": {\n        "name": "rain",\n        "parameters": {\n'
              '            "a": "<b>&\'c\'"\n        }\n    }\n}\n<|eot_id|>'
              "<|start_header_id|>user<|end_header_id|>\n\nRain?<|eot_id|>"
              '{"name": "rain", "parameters": {"town": "Köln"}}<|eot_id|>'
              "<|start_header_id|>tool<|end_header_id|>\n\nno<|eot_id|>"
              "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "QWEN3": '<|im_start|>system\n<tools>\n{"type": "function", "function": {"name": "rain", "parameters": '
             '{"a": "<b>&\'c\'"}}}\n</tools><|im_end|>\n<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n'
             '\n<tool_call>{"name": "rain", "arguments": {"town": "Köln"}}</tool_call><|im_end|>\n'
             "<|im_start|>user\n<tool_response>\nno\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
}
