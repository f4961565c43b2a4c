"""Fold a model's KV cache in three lines."""

import kvfold

model, tokenizer = kvfold.demo_model()  # or any AutoModelForCausalLM

kvfold.attach(model)  # attention reads folded caches from now on
cache = kvfold.FoldedCache(model.config, "kvfold-4")
text = "A short story about a lighthouse keeper. " * 50  # the first 256 tokens wait, dense; then they fold
inputs = tokenizer(text, return_tensors="pt")
output = model.generate(**inputs, past_key_values=cache, max_new_tokens=20, do_sample=False)

print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :]))
print(f"{cache.held_bytes():,} bytes held, {cache.bits_per_value():.2f} bits a value; bfloat16 has 16")
