// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/must"
)

// udpPair returns the arguments of runUDP for two hosts that are peers.
func (b *bed) udpPair() (configs []string) {
	hosts := b.lab.Hosts()
	for i, h := range hosts {
		configs = append(configs, fmt.Sprintf("%s %s", h.Addr(prefix.IPv4), hosts[1-i].Addr(prefix.IPv4)))
	}
	return configs
}

// runUDP carries packets between a TUN device and one peer, one by one, like the
// program of flannel's udp backend: it polls, and then reads and writes until there is
// no packet left. Like that program it uses the kernel's default buffer sizes. config
// contains this host's address and that of the peer.
func runUDP(config string) {
	own, peer, _ := strings.Cut(config, " ")
	local := must.Get(netip.ParseAddr(own))
	remote := must.Get(netip.ParseAddr(peer))
	socket := must.Get(unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0))
	must.Do(unix.Bind(socket, &unix.SockaddrInet4{Port: plainPort, Addr: local.As4()}))
	must.Do(unix.Connect(socket, &unix.SockaddrInet4{Port: plainPort, Addr: remote.As4()}))
	device := openPlainDevice()
	ready := []unix.PollFd{{Fd: int32(device), Events: unix.POLLIN}, {Fd: int32(socket), Events: unix.POLLIN}}
	buf := make([]byte, 2048)
	for {
		if _, err := unix.Poll(ready, -1); !errors.Is(err, unix.EINTR) {
			must.Do(err)
		}
		for more := true; more; {
			more = move(buf, device, socket)
			more = move(buf, socket, device) || more
		}
	}
}

// move forwards one packet with the buffer buf. It returns false if there is no
// packet.
func move(buf []byte, from, to int) bool {
	n, err := unix.Read(from, buf)
	if err != nil {
		return errors.Is(err, unix.ECONNREFUSED) // the peer has not started yet; continue
	}
	_, _ = unix.Write(to, buf[:n])
	return true
}

func openPlainDevice() (fd int) {
	fd = must.Get(unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0))
	request := must.Get(unix.NewIfreq(plainDevice))
	request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	must.Do(unix.IoctlIfreq(fd, unix.TUNSETIFF, request))
	return fd
}
