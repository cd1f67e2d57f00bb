// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"testing"

	"github.com/flanneld/flanneld/test/lab"
)

// TestPrometheusScrapes checks that a real Prometheus reads the metrics of a daemon and
// loads the shipped alert rules. When the daemon is killed, the alert FlannelDown must be
// pending.
//
//stages:rest it starts Prometheus
func TestPrometheusScrapes(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	startAll(t, l, lab.FlanneldOptions{})
	expectConverged(t, l)
	h := l.Host(1)
	rules, err := os.ReadFile("../../dist/prometheus/flannel-rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	const config = `
global: {scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}
rule_files: [/run/prometheus/rules.yml]
scrape_configs: [{job_name: flannel, static_configs: [{targets: ["127.0.0.1:8081"]}]}]
`
	dir := h.Path("/run/prometheus")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"prometheus.yml": config, "rules.yml": string(rules)} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	ctx := testContext(t)
	ended := make(chan error, 1)
	go func() {
		out, err := h.Exec(ctx, "prometheus", "--config.file=/run/prometheus/prometheus.yml",
			"--storage.tsdb.path=/run/prometheus/data", "--web.listen-address=127.0.0.1:9090")
		ended <- fmt.Errorf("prometheus ended: %w: %s", err, out)
	}()
	client := &http.Client{Transport: &http.Transport{DialContext: h.Dial, DisableKeepAlives: true}}
	query := func(expr string) (found int, err error) {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:9090/api/v1/query?query="+url.QueryEscape(expr), nil)
		if err != nil {
			return 0, err
		}
		answer, err := client.Do(r)
		if err != nil {
			return 0, err
		}
		defer answer.Body.Close()
		var body struct {
			Data struct{ Result []json.RawMessage }
		}
		err = json.NewDecoder(answer.Body).Decode(&body)
		return len(body.Data.Result), err
	}
	for _, expr := range []string{`flannel_peers{state="served"} == 1`, `flannel_ready == 1`, `up{job="flannel"} == 1`} {
		eventually(t, expr, func() error {
			select {
			case err := <-ended:
				t.Fatal(err)
			default:
			}
			if n, err := query(expr); err != nil || n != 1 {
				return fmt.Errorf("%d results, %w", n, err)
			}
			return nil
		})
	}
	h.Daemon().Kill()
	eventually(t, "the alert FlannelDown is pending", func() error {
		if n, err := query(`ALERTS{alertname="FlannelDown", alertstate="pending"}`); err != nil || n != 1 {
			return fmt.Errorf("%d alerts, %w", n, err)
		}
		return nil
	})
}
