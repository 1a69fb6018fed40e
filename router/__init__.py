"""The router: picks a prefill and a decode worker for each request and gives the client the decode worker's answer.

Installs and runs without torch; knows nothing of engine/.
"""
