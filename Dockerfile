# The context is a folder with the two static binaries; `make image` makes it.
FROM scratch
COPY flanneld flannelctl /opt/bin/
ENTRYPOINT ["/opt/bin/flanneld"]
