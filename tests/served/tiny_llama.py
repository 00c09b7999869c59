"""Makes a model of 4 layers with random weights, and its tokenizer, in the folder that is named."""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LINES = ["the quick brown fox jumps over the lazy dog", "a request lives in several processes and in batches"]

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
tokenizer.train_from_iterator(LINES, trainer)
words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
words.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
words.save_pretrained(sys.argv[1])

torch.manual_seed(1)
config = LlamaConfig(
    vocab_size=len(tokenizer.get_vocab()),
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
