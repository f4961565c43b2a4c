"""Spend bits where they matter: keys finer than values, the first layers dense."""

import kvfold

model, tokenizer = kvfold.demo_model()
kvfold.attach(model)
text = "The keys decide where attention looks, the values what it sees. " * 34  # 256 tokens stay dense
inputs = tokenizer(text, return_tensors="pt")

policies = {
    "both alike": kvfold.Policy("kvfold-4"),
    "3-bit values": kvfold.Policy("kvfold-4:turboquant-3"),
    "3-bit values, first two layers dense": kvfold.Policy("kvfold-4:turboquant-3", dense_first=2),
}
for name, policy in policies.items():
    cache = kvfold.FoldedCache(model.config, policy=policy)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False)
    print(f"{name}: {cache.held_bytes():,} bytes, {cache.bits_per_value():.2f} bits a value")
    for layer in cache.report().layers[:3]:
        print(f"  layer {layer.layer}: {layer.format}, {layer.held_bytes:,} bytes for {layer.tokens} tokens")
