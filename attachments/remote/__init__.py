"""Remote inference servers: rollouts are sampled on other processes or machines, with the weights of this run."""
