"""One model over several processes: each holds a part of every layer's heads and of its MLP."""
