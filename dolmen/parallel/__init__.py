"""How a model is split over processes, one mechanism per file. Knows no model class.

tensor.py             tensor and sequence parallelism: column- and row-parallel linear layers
vocabulary.py         embedding, LM head and cross-entropy over the split vocabulary
log_probabilities.py  log-probabilities of labels and entropy over the split vocabulary
qk_norm.py            RMSNorm over heads that tp has split
styles.py             tensor parallelism of any nn.Module
data.py               ZeRO 0 to 3 through `fully_shard`; reduction, norm and scale of gradients
exact.py              exact numerics: the same bits at every layout
assembly.py           matrices put together on one rank, for Muon
context.py            ring and gathered attention over zigzag chunks
expert.py             tokens to their experts and back
schedule.py           pipeline schedules as lists of actions, the five with a name, files
simulation.py         schedules checked and timed
pipeline.py           executes one rank's list of a schedule
quantized_product.py  8-bit products and their scales over any layout
inference_linear.py   prepacked and int8 weights, multi-LoRA: linear layers without gradients
"""
