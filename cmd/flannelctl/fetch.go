// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// networkFlag is the name of the flag that chooses one of several networks.
const networkFlag = "network"

// statusTimeout limits the time that a daemon may take to answer.
const statusTimeout = 10 * time.Second

// maxReport limits the size of an answer, in bytes. A report about 10,000 peers has some 20 MB.
const maxReport = 128 << 20

// awayError means that no daemon answers, and why.
type awayError struct{ cause error }

// Error implements error.
func (e awayError) Error() string {
	text := "ask flanneld for its status: " + e.cause.Error()
	if errors.Is(e.cause, fs.ErrPermission) {
		text += ": run flannelctl as root"
	}
	return text
}

// Unwrap returns the cause. It makes the exit code 2.
func (e awayError) Unwrap() error { return openError{e.cause} }

// errNotReady makes the exit code 1. The command has already printed the reason.
var errNotReady = errors.New("flanneld is not ready")

// addNetworkTo adds the flag that chooses one of several networks to the flags of a command.
func addNetworkTo(cmd *cobra.Command, flags *pflag.FlagSet, network *string, h host) {
	flags.StringVar(network, networkFlag, "", "one of several networks, by name")
	completeFrom(cmd, networkFlag, &daemonFlags{socket: h.socket}, networkNames)
}

// daemonFlags choose the daemon of this host, and one of its networks.
type daemonFlags struct{ socket, network string }

func (d *daemonFlags) addTo(cmd *cobra.Command, h host) {
	d.addSocketTo(cmd, h)
	addNetworkTo(cmd, cmd.Flags(), &d.network, h)
}

func (d *daemonFlags) addSocketTo(cmd *cobra.Command, h host) {
	cmd.Flags().StringVar(&d.socket, "socket", h.socket, "local socket of the daemon")
}

// socketURL is the base of the URLs of the daemon of this host, which is asked through its socket.
const socketURL = "http://flanneld"

// report asks the daemon for its report about the network.
func (d daemonFlags) report(ctx context.Context) (status.Report, error) {
	return fetch(ctx, status.Client(d.socket), socketURL, d.network)
}

// all asks the daemon for the reports about all its networks, or about the one that is chosen.
func (d daemonFlags) all(ctx context.Context) ([]status.Report, error) {
	r, err := d.report(ctx)
	if err != nil || len(r.Networks) == 0 {
		return []status.Report{r}, err
	}
	var all []status.Report
	for _, n := range r.Networks {
		d.network = n.Name
		one, err := d.report(ctx)
		if err != nil {
			return nil, err
		}
		all = append(all, one)
	}
	return all, nil
}

// one asks the daemon for the report about one network. If none is chosen and the daemon serves several, the error
// names them.
func (d daemonFlags) one(ctx context.Context) (status.Report, error) {
	r, err := d.report(ctx)
	if err != nil || len(r.Networks) == 0 {
		return r, err
	}
	names := strings.Join(networkNames(r), ", ")
	return r, openError{fmt.Errorf("this daemon serves several networks: choose one of %s with --%s", names, networkFlag)}
}

// fetch asks the daemon at the URL base for its report about one network. If network is empty, a
// daemon with one network reports about that one, and a daemon with several lists them in Networks.
func fetch(ctx context.Context, client *http.Client, base, network string) (r status.Report, err error) {
	within, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	fail := func(err error) (status.Report, error) {
		if within.Err() != nil && ctx.Err() == nil {
			err = fmt.Errorf("no answer within %s", statusTimeout)
		}
		return r, awayError{err}
	}

	address, err := url.JoinPath(base, "statusz.json")
	if err != nil {
		return fail(err)
	}
	if network != "" {
		address += "?network=" + url.QueryEscape(network)
	}

	resp, err := request(within, client, address)
	if err != nil {
		return fail(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusNotFound && network != "" {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return r, openError{errors.New(strings.TrimSpace(string(text)))}
	}
	if resp.StatusCode == http.StatusNotFound {
		return fail(fmt.Errorf("GET %s: %s: that is no flanneld with a status page", address, resp.Status))
	}
	if resp.StatusCode != http.StatusOK {
		return fail(fmt.Errorf("GET %s: %s", address, resp.Status))
	}

	text, err := io.ReadAll(io.LimitReader(resp.Body, maxReport+1))
	if err != nil {
		return fail(err)
	}
	if len(text) > maxReport {
		return fail(fmt.Errorf("GET %s: the answer is larger than %d MiB", address, maxReport>>20))
	}
	if text, err = printable(text); err == nil {
		err = json.Unmarshal(text, &r)
	}
	if err != nil {
		return fail(err)
	}
	return r, nil
}

// request sends a GET request. Its errors do not have the URL, which only stands for a socket, or is long. Of
// a socket they have the path and the reason.
func request(ctx context.Context, client *http.Client, address string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if e := (*url.Error)(nil); errors.As(err, &e) {
		err = e.Err
	}
	if e := (*net.OpError)(nil); errors.As(err, &e) && e.Net == "unix" && e.Addr != nil {
		err = fmt.Errorf("%s: %w", e.Addr, reason(e))
	}
	return resp, err
}

// printable returns a JSON document with all strings on one line and without characters that control a
// terminal. Reports contain texts that other hosts have written.
func printable(document []byte) ([]byte, error) {
	var v any
	d := json.NewDecoder(bytes.NewReader(document))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		return nil, err
	}

	var clean func(any) any
	clean = func(v any) any {
		switch v := v.(type) {
		case string:
			return oneline.Collapse(v)
		case []any:
			for i := range v {
				v[i] = clean(v[i])
			}
		case map[string]any:
			cleaned := make(map[string]any, len(v))
			for key, value := range v {
				cleaned[oneline.Collapse(key)] = clean(value)
			}
			return cleaned
		}
		return v
	}
	return json.Marshal(clean(v))
}
