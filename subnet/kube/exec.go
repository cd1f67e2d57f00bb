// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/subnet"
)

// The first byte of a message says to which stream the rest belongs.
const (
	streamOutput  = 1
	streamErrors  = 2
	streamOutcome = 3 // a Status, in JSON, when the command has ended
)

// Exec runs a command in a container of a pod, without input, and returns at most limit bytes of what it writes to
// standard output, even with an error. It speaks WebSocket, as kubectl does since 1.31 and servers do since 1.4:
// no proxy on the way has to know SPDY.
func (d *Daemons) Exec(ctx context.Context, pod, container string, limit int, command ...string) ([]byte, error) {
	key := make([]byte, 16)
	_, _ = rand.Read(key) // never fails
	resp, err := d.client.do(ctx, request{
		path:  "namespaces/" + url.PathEscape(d.namespace) + "/pods/" + url.PathEscape(pod) + "/exec",
		query: url.Values{"container": {container}, "command": command, "stdout": {"true"}, "stderr": {"true"}}, accept: "*/*",
		header: http.Header{
			"Connection": {"Upgrade"}, "Upgrade": {"websocket"},
			"Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {base64.StdEncoding.EncodeToString(key)},
			// Servers before 1.30 know only v4, which differs in what a client may send.
			"Sec-Websocket-Protocol": {"v5.channel.k8s.io, v4.channel.k8s.io"},
		},
	})
	if hasCode(err, http.StatusForbidden) {
		return nil, fmt.Errorf("you need the rights to get and create pods/exec in namespace %s: %w", d.namespace, err)
	}
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return nil, fmt.Errorf("API server %s: %s instead of a WebSocket", d.client.host, resp.Status)
	}

	// After the answer, the connection no longer belongs to the request and its context.
	defer context.AfterFunc(ctx, func() { _ = resp.Body.Close() })()
	output, err := readStreams(bufio.NewReader(resp.Body), limit)
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return output, err
}

// readStreams reads the messages of a command until it has ended.
func readStreams(r io.Reader, limit int) (output []byte, err error) {
	var errs, outcome []byte
	var stream byte
	for {
		f, err := readFrame(r, limit)
		if err != nil {
			return output, fmt.Errorf("the connection to the pod has ended early: %w", err)
		}
		switch f.kind {
		case frameClose:
			return output, fmt.Errorf("the connection to the pod was closed before the command ended: %s", subnet.Shorten(string(errs)))
		case frameText, frameBinary:
			if len(f.payload) == 0 {
				continue
			}
			stream = f.payload[0]
			f.payload = f.payload[1:]
		case frameContinuation:
		default:
			continue // a ping or pong
		}

		switch stream {
		case streamOutput:
			output = append(output, f.payload...)
		case streamErrors:
			errs = append(errs, f.payload...)
		case streamOutcome:
			outcome = append(outcome, f.payload...)
		}
		if len(output)+len(errs)+len(outcome) > limit {
			return output[:min(len(output), limit)], fmt.Errorf("the pod sends more than %d bytes", limit)
		}
		if stream == streamOutcome && f.last {
			return output, decodeOutcome(outcome, errs)
		}
	}
}

// decodeOutcome returns nil if a command was successful, and otherwise what it has written about its failure.
func decodeOutcome(outcome, errs []byte) error {
	var status struct{ Status, Message string }
	if err := json.Unmarshal(outcome, &status); err != nil {
		return fmt.Errorf("decode the outcome of the command: %w", err)
	}
	if status.Status == "Success" {
		return nil
	}
	return errors.New(oneline.Collapse(strings.TrimSpace(status.Message + ": " + subnet.Shorten(string(errs)))))
}

// The kinds of frames, RFC 6455 section 5.2.
const (
	frameContinuation = 0
	frameText         = 1
	frameBinary       = 2
	frameClose        = 8
)

type frame struct {
	kind    byte
	last    bool // of its message
	payload []byte
}

// readFrame reads a frame of a server, which is not masked.
func readFrame(r io.Reader, limit int) (f frame, err error) {
	var head [2]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return f, err
	}
	f.last = head[0]&0x80 != 0
	f.kind = head[0] & 0x0f
	length := uint64(head[1])
	switch length {
	case 126:
		var l uint16
		err = binary.Read(r, binary.BigEndian, &l)
		length = uint64(l)
	case 127:
		err = binary.Read(r, binary.BigEndian, &length)
	}

	switch {
	case err != nil:
		return f, err
	case head[0]&0x70 != 0 || head[1]&0x80 != 0 || length > uint64(limit):
		return f, fmt.Errorf("a frame of %d bytes with the head %x is not expected", length, head)
	}
	f.payload = make([]byte, length)
	_, err = io.ReadFull(r, f.payload)
	return f, err
}
