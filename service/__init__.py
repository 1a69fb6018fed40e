"""The parts that make a process a server: HTTP, security, signals, telemetry. Imports no other
package.
"""
