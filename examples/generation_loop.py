"""A generation loop written by hand: read a prompt in chunks, then decode token by token."""

import torch

import kvfold

model, tokenizer = kvfold.demo_model()
kvfold.attach(model)
cache = kvfold.FoldedCache(model.config)
ids = tokenizer("Count from one to twenty: one, two, three, four, five, six,", return_tensors="pt").input_ids

with torch.no_grad():
    for part in ids.split(8, dim=1):  # the chunks make no difference to what comes out
        logits = model(part, past_key_values=cache).logits
    said = []
    for _ in range(20):
        token = logits[:, -1:].argmax(-1)
        said.append(token.item())
        logits = model(token, past_key_values=cache).logits

    print(tokenizer.decode(said))
    cache.crop(-5)  # take the last five tokens back and go on from there
    print(cache.get_seq_length(), "tokens held after the crop")
