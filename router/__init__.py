"""The router: chooses the workers of requests and passes their answers on. Without torch and
engine/.
"""
