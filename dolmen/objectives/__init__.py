"""What a model is trained to: pure functions of the last hidden vectors, the head that the model
owns, and the batch.
"""
