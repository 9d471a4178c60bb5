"""The same server on a Ray cluster: the API in ingress replicas, an engine process in each engine replica."""
