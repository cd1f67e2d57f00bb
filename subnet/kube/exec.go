// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/coder/websocket"

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
	u := d.client.url(request{
		path:  "namespaces/" + url.PathEscape(d.namespace) + "/pods/" + url.PathEscape(pod) + "/exec",
		query: url.Values{"container": {container}, "command": command, "stdout": {"true"}, "stderr": {"true"}},
	})
	conn, resp, err := websocket.Dial(ctx, u.String(), &websocket.DialOptions{
		HTTPClient: d.client.http,
		// Servers before 1.30 know only v4, which differs in what a client may send.
		Subprotocols: []string{"v5.channel.k8s.io", "v4.channel.k8s.io"},
	})
	if err != nil {
		if resp != nil && resp.StatusCode != http.StatusSwitchingProtocols {
			err = d.client.refusal(resp) // Dial has read the body, and closed it
		} else {
			err = d.client.explain(err)
		}
		if hasCode(err, http.StatusForbidden) {
			err = fmt.Errorf("you need the rights to get and create pods/exec in namespace %s: %w", d.namespace, err)
		}
		return nil, err
	}
	defer func() { _ = conn.CloseNow() }()

	conn.SetReadLimit(int64(limit))
	output, err := readStreams(ctx, conn, limit)
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return output, err
}

// readStreams reads the messages of a command until it has ended.
func readStreams(ctx context.Context, conn *websocket.Conn, limit int) (output []byte, err error) {
	var errs []byte
	for {
		_, message, err := conn.Read(ctx)
		if err != nil {
			return output, fmt.Errorf("the connection to the pod has ended before the command: %w: %s", err, subnet.Shorten(string(errs)))
		}
		if len(message) == 0 {
			continue
		}

		text := message[1:]
		if len(output)+len(errs)+len(text) > limit {
			return output, fmt.Errorf("the pod sends more than %d bytes", limit)
		}
		switch message[0] {
		case streamOutput:
			output = append(output, text...)
		case streamErrors:
			errs = append(errs, text...)
		case streamOutcome:
			return output, decodeOutcome(text, errs)
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
