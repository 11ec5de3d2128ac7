"""A Hugging Face model on fulmen's kernels: a padded batch, its loss, and generation.

python examples/hugging_face.py        # needs the package transformers
"""

import torch
import transformers

import fulmen.integrations.transformers

fulmen.integrations.transformers.register()

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0,
)  # fmt: skip
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="fulmen")
# A model that exists already: model.set_attn_implementation("fulmen")

ids = torch.randint(3, 256, (2, 12))
padding = torch.ones_like(ids)
padding[0, :5] = 0  # the first row has 7 tokens, padded on the left
labels = ids.masked_fill(padding == 0, -100)

loss = model(ids, attention_mask=padding, labels=labels).loss
loss.backward()
print(f"loss {loss.item():.3f}")

with torch.no_grad():
    ours = model(ids, attention_mask=padding).logits
    model.set_attn_implementation("sdpa")
    theirs = model(ids, attention_mask=padding).logits
    model.set_attn_implementation("fulmen")
    longer = model.generate(ids, attention_mask=padding, max_new_tokens=5, do_sample=False)
error = (ours - theirs)[padding == 1].abs().max()
print(f"logits differ from sdpa's by {error:.1e} at most; generated {longer[:, ids.shape[1] :].tolist()}")
assert error < 1e-4
