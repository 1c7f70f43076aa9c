"""`quartet wyoming`: Home Assistant's voice. A server of the Wyoming protocol, and a client of the HTTP API.

`catalog` is what the gateway offers, `gateway` asks it, `sound` is what was recorded, `answers` is a request and its
events, `connection` is one client, `server` is the program. Within, `wyoming` is the library of that name.
"""
