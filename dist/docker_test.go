// SPDX-License-Identifier: Apache-2.0

package dist_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const dockerDropIn = "/etc/systemd/system/docker.service.d/flannel.conf"

// TestPagesRemoveTheDropIn checks that pages that describe the removal of flanneld also
// name Docker's drop-in. With the drop-in and without flanneld, Docker does not start.
func TestPagesRemoveTheDropIn(t *testing.T) {
	for page, about := range map[string]string{
		"operations.md": "systemctl disable --now flanneld",
		"packages.md":   "operations.md#remove-flanneld-from-a-host",
		"docker.md":     "operations.md#remove-flanneld-from-a-host",
	} {
		raw, err := os.ReadFile("../Documentation/" + page)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(strings.Split(string(raw), "\n\n"), func(paragraph string) bool {
			return strings.Contains(paragraph, about) && strings.Contains(paragraph, dockerDropIn)
		}) {
			t.Errorf("%s does not name %s beside %s", page, dockerDropIn, about)
		}
	}
}

// TestDockerDropIn checks that the drop-in makes systemd read the file that the script
// writes, and that this file contains the expected options of dockerd. Docker must not stop
// when flanneld restarts.
func TestDockerDropIn(t *testing.T) {
	raw, err := os.ReadFile("systemd/docker-flannel.conf")
	if err != nil {
		t.Fatal(err)
	}
	if with := regexp.MustCompile(`(?m)^(Requires|Requisite|BindsTo|PartOf)=.*$`).Find(raw); with != nil {
		t.Errorf("%s stops Docker when flanneld restarts", with)
	}
	pre := regexp.MustCompile(`(?m)^ExecStartPre=/usr/bin/env -u DOCKER_OPTS /usr/local/bin/mk-docker-opts\.sh (.*)$`).FindStringSubmatch(string(raw))
	read := regexp.MustCompile(`(?m)^EnvironmentFile=-(.*docker.*)$`).FindStringSubmatch(string(raw))
	if pre == nil || read == nil || !strings.Contains(pre[1], "-d "+read[1]) {
		t.Fatalf("the drop-in reads another file than the script writes:\n%s", raw)
	}
	dir := t.TempDir()
	in, out := filepath.Join(dir, "subnet.env"), filepath.Join(dir, "docker.env")
	if err := os.WriteFile(in, []byte(sample), 0o600); err != nil {
		t.Fatal(err)
	}
	args := strings.Fields(strings.ReplaceAll(pre[1], read[1], out))
	// systemd reads the options file before every command of the unit. So at a second start
	// the script finds the options of the first start in its environment, as in the second
	// case here.
	for _, before := range []string{"", "--bip=10.1.73.1/24"} {
		cmd := exec.CommandContext(t.Context(), "/usr/bin/env", append([]string{"-u", "DOCKER_OPTS", "./mk-docker-opts.sh", "-f", in}, args...)...)
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "DOCKER_OPTS=" + before}
		if text, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
	}
	cmd := exec.CommandContext(t.Context(), "sh", "-c", `. "$1" && printf '%s\n' $DOCKER_OPTS`, "sh", out)
	cmd.Env = []string{}
	got, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff("--bip=10.1.74.1/24\n--ip-masq=true\n--mtu=1472\n", string(got)); diff != "" {
		t.Errorf("options of dockerd (-want +got):\n%s", diff)
	}
}
