"""Read a long prompt once, keep it folded in a file, and ask it several questions."""

import copy
import tempfile
from pathlib import Path

import torch

import kvfold

model, tokenizer = kvfold.demo_model()
kvfold.attach(model)
notes = "Anna keeps bees on the roof. Boris repairs old radios. Clara sails to Gotland every June. "
prompt = tokenizer("These are my neighbours. " + notes * 20, return_tensors="pt").input_ids
cache = kvfold.FoldedCache(model.config)
with torch.no_grad():
    model(prompt, past_key_values=cache)

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "neighbours.safetensors"
    cache.save(path, ids=prompt)
    print(f"{prompt.shape[1]} tokens in {path.stat().st_size:,} bytes")
    read = kvfold.FoldedCache.load(path, model.config)  # in another process, on another day

for question in ("Boris repairs old", "Every June Clara sails to"):
    own = copy.deepcopy(read)  # what is asked here changes neither the file nor the next copy
    ids = torch.cat((read.ids, tokenizer(question, return_tensors="pt").input_ids), 1)
    output = model.generate(ids, past_key_values=own, max_new_tokens=4, do_sample=False)  # reads the question only
    print(question, "…", tokenizer.decode(output[0, ids.shape[1] :]).strip())
