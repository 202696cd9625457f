"""Protocol codecs without sockets: arrays in, request bytes out; reply bytes in, arrays out."""
