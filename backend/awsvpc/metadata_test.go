// SPDX-License-Identifier: Apache-2.0

package awsvpc

import (
	"bytes"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/flanneld/flanneld/backend/awsvpc/ec2test"
	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
)

// TestMetadataMock checks flanneld with AWS's own imitation of the metadata service, which accepts
// only IMDSv2. The host must find its instance there, and sign calls of EC2 with the credentials of
// the role.
//
//stages:rest its program comes from make components
func TestMetadataMock(t *testing.T) {
	s := ec2test.New()
	me := s.AddInstance(1, "subnet-1", own4)
	become(t, httputil.NewSingleHostReverseProxy(startMetadataMock(t, me)), cloudtest.Serve(t, s))
	c := bed().Backend(t, `{}`).Cloud
	if _, err := c.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	if i := s.Instance(me.ID); i.Restricted || s.Writes() != 1 {
		t.Errorf("the source/dest check of %s is %v after %d writes, want it off after one", me.ID, i.Restricted, s.Writes())
	}
}

// startMetadataMock starts a metadata service that ends with the test, for an instance. It returns
// the URL of the service.
func startMetadataMock(t *testing.T, i vpctest.Instance) *url.URL {
	t.Helper()
	config, err := json.Marshal(map[string]any{"metadata": map[string]any{"values": map[string]any{
		"instance-id": i.ID, "placement-region": vpctest.Region,
		"iam-security-credentials": map[string]string{
			"Code": "Success", "Type": "AWS-HMAC", "AccessKeyId": vpctest.KeyID, "SecretAccessKey": vpctest.Secret, "Token": vpctest.Token,
			"LastUpdated": time.Now().UTC().Format(time.RFC3339), "Expiration": time.Now().Add(6 * time.Hour).UTC().Format(time.RFC3339),
		},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(file, config, 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0") // to find a free port
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().(*net.TCPAddr)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("../../bin/tools/ec2-metadata-mock", "--config-file", file, "--imdsv2",
		"--hostname", address.IP.String(), "--port", strconv.Itoa(address.Port))
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.Env = append(os.Environ(), "HOME="+t.TempDir())                // the program writes the configuration in use there
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // ends the program even if the test is interrupted
	if err := cmd.Start(); err != nil {
		t.Fatalf("%v: run make components", err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("the log of ec2-metadata-mock:\n%s", &log)
		}
	})
	to := &url.URL{Scheme: "http", Host: address.String()}
	waittest.Until(t, 10*time.Second, "an answer of ec2-metadata-mock", func() bool {
		answer, err := http.Get(to.String())
		if err != nil {
			return false
		}
		return answer.Body.Close() == nil
	})
	return to
}
