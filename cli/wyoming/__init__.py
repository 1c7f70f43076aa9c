"""`quartet wyoming`: Home Assistant's voice. A server of the Wyoming protocol, and a client of the HTTP API.

`gateway_client` asks the gateway, `known_offer` is what that offers, `sound` is what was recorded, `answers` is a
request and its events, `connection` is one client, `server` is the program. Within, `wyoming` is the library.
"""
