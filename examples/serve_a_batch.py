"""Prompts of different lengths in one batch: each row is folded as if it were alone.

These are short: a row's first 256 tokens stay dense until that many have come.
"""

import kvfold

model, tokenizer = kvfold.demo_model()
kvfold.attach(model)
tokenizer.padding_side = "left"

questions = [
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea, in which a gull, a boat and a storm appear.",
]
prompts = [
    tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
    for q in questions
]
batch = tokenizer(prompts, return_tensors="pt", padding=True)
cache = kvfold.FoldedCache(model.config)
output = model.generate(**batch, past_key_values=cache, max_new_tokens=24, do_sample=False)
for question, row in zip(questions, output, strict=True):
    answer = tokenizer.decode(row[batch.input_ids.shape[1] :], skip_special_tokens=True)
    print(f"{question}\n  {answer.strip()}")
