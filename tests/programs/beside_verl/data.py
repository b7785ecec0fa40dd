"""Make a tokenizer with a chat template and rows of messages for verl: data.py MODEL FOLDER."""

import sys

import pandas
from transformers import AutoTokenizer

model, folder = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model)
tokenizer.chat_template = (
    "{% for m in messages %}{{m['role']}}\n{{m['content']}}{{eos_token}}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
tokenizer.save_pretrained(model)
rows = [
    {"messages": [{"role": "user", "content": f"{i}+1?"}, {"role": "assistant", "content": str(i + 1)}]}
    for i in range(64)
]
pandas.DataFrame(rows).to_parquet(f"{folder}/chats.parquet")
