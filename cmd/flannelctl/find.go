// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/subnetfile"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet/kube"
)

// host has the paths at which the daemon of this host and its settings are found.
type host struct {
	socket         string
	settings       string // of the systemd unit
	serviceAccount string // of the pod
}

// thisHost returns the paths on every host, except for those in tests.
func thisHost() host {
	return host{
		socket:         status.SocketPath("/run/flannel/subnet.env"),
		settings:       "/etc/flannel/flanneld.env",
		serviceAccount: "/var/run/secrets/kubernetes.io/serviceaccount",
	}
}

// place is where the store was found. It is zero if a flag or variable of flannelctl locates the store.
type place struct {
	name     string            // for errors; empty if nothing was found
	settings map[string]string // values of flanneld's flags, by name
	looked   []string          // why each place before names no store
	denied   error             // why a place could not be read, so that the store is not known; otherwise nil
	// apiURL and serviceAccount are those of a daemon in the pod of another mount namespace.
	apiURL, serviceAccount string
	// given are all flags of a daemon, and env is its environment.
	given map[string]string
	env   []string
}

// storeSettings are the flags of flanneld that are about the store. The value is true if that of the flag is a path.
var storeSettings = map[string]bool{
	"etcd-endpoints": false, "etcd-prefix": false, "etcd-username": false, "etcd-password": false,
	"etcd-cafile": true, "etcd-certfile": true, "etcd-keyfile": true,
	"kube-subnet-mgr": false, "kube-api-url": false, "kube-annotation-prefix": false, "kubeconfig-file": true, netConfigPath: true,
}

// findStore looks for the store: in the running daemon, in the settings of the unit and then, if kubernetes
// is true, where kubectl does.
func (h host) findStore(kubernetes bool) place {
	var p place
	for _, look := range []func() (place, error){h.fromDaemon, h.fromSettings} {
		found, err := look()
		if err == nil {
			found.looked = p.looked
			return found
		}
		// A host whose daemon is not known may use another store than the kubeconfig of this user names.
		if errors.Is(err, fs.ErrPermission) {
			p.denied = err
			return p
		}
		p.looked = append(p.looked, err.Error())
	}
	if !kubernetes {
		return p
	}

	name, missing := kube.Find()
	if name == "" {
		p.looked = append(p.looked, missing...)
		return p
	}
	p.name = name
	p.settings = map[string]string{"kube-subnet-mgr": "true"} // package kube finds the rest
	return p
}

// fromDaemon takes the settings from the arguments and the environment of the daemon of this host.
func (h host) fromDaemon() (place, error) {
	pid, err := listener(h.socket)
	if err != nil {
		return place{}, fmt.Errorf("no flanneld answers on %s: %w", h.socket, err)
	}
	if pid == 0 {
		return place{}, fmt.Errorf("the flanneld on %s is in another PID namespace", h.socket)
	}

	proc := "/proc/" + strconv.Itoa(pid)
	args, err := list0(proc + "/cmdline")
	env, failed := list0(proc + "/environ")
	if err = cmp.Or(err, failed); err != nil {
		return place{}, err
	}
	given, err := options.Given(args[min(1, len(args)):], env)
	if err != nil { // which may contain a secret of another program
		return place{}, fmt.Errorf("process %d, which listens on %s, has other flags than flanneld", pid, h.socket)
	}

	p := place{name: fmt.Sprintf("the flanneld of this host (process %d)", pid), settings: map[string]string{}, given: maps.Clone(given), env: env}
	root := ""
	here, err := os.Readlink("/proc/self/ns/mnt")
	there, failed := os.Readlink(proc + "/ns/mnt")
	if err == nil && failed == nil && there != here {
		root = proc + "/root"
	}
	if _, ok := given[netConfigPath]; given["kube-subnet-mgr"] != "" && !ok {
		if _, err := os.Stat(root + options.DefaultNetConfigPath); err == nil {
			given[netConfigPath] = options.DefaultNetConfigPath
		}
	}

	for name, isPath := range storeSettings {
		if text := given[name]; isPath && text != "" {
			p.settings[name] = root + text
		} else if text != "" {
			p.settings[name] = text
		}
	}
	if host := value(env, "KUBERNETES_SERVICE_HOST"); root != "" && host != "" {
		p.apiURL = "https://" + net.JoinHostPort(host, value(env, "KUBERNETES_SERVICE_PORT"))
		p.serviceAccount = root + h.serviceAccount
	}
	return p, nil
}

// listener returns the id of the process that listens on a local socket, or 0 if this process cannot see it.
func listener(path string) (pid int, err error) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path})
	if err != nil {
		return 0, reason(err)
	}
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var failed error
	err = raw.Control(func(fd uintptr) { cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, failed); err != nil {
		return 0, err
	}
	return int(cred.Pid), nil
}

// fromSettings takes the settings from the file of the systemd unit.
func (h host) fromSettings() (place, error) {
	text, err := os.ReadFile(h.settings)
	if err != nil {
		return place{}, fmt.Errorf("%s: %w", h.settings, reason(err))
	}
	p := place{name: h.settings, settings: map[string]string{}}
	vars := subnetfile.Variables(text)
	for name := range storeSettings {
		if text := vars[options.Variable(name)]; text != "" {
			p.settings[name] = text
		}
	}
	if len(p.settings) == 0 {
		return place{}, fmt.Errorf("%s names no store", h.settings)
	}
	return p, nil
}

// variables returns the settings as the environment of flanneld.
func (p place) variables() []string {
	var vars []string
	for name, text := range p.settings {
		vars = append(vars, options.Variable(name)+"="+text)
	}
	return vars
}

// check returns an error if the store was found nowhere, and no etcd listens on the endpoints that flanneld uses by
// default.
func (p place) check(endpoints []string, kubernetes bool) error {
	switch {
	case p.denied != nil:
		looked := strings.Join(append(p.looked, ""), "; ")
		return fmt.Errorf("the store is not known: %s%w: run flannelctl as root, or name the store with flags",
			looked, p.denied)
	case p.name != "" || len(p.looked) == 0:
		return nil
	}

	for _, e := range endpoints {
		if u, err := url.Parse(e); err == nil {
			if conn, err := net.DialTimeout("tcp", u.Host, time.Second); err == nil {
				return conn.Close()
			}
		}
	}

	flags := "--etcd-endpoints"
	if kubernetes {
		flags += ", --kubeconfig-file or --context"
	}
	return fmt.Errorf("no store was found: %s; nothing listens on %s: name the store with %s", strings.Join(p.looked, "; "), oneline.List(endpoints, ", "), flags)
}

// reason returns the last error of a chain, such as fs.ErrNotExist, without the operation and the path.
func reason(err error) error {
	if e := unix.Errno(0); errors.As(err, &e) {
		return e
	}
	return err
}

// list0 reads a file of texts that each end with a zero byte.
func list0(path string) ([]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return strings.Split(string(bytes.TrimSuffix(text, []byte{0})), "\x00"), nil
}

func value(env []string, name string) string {
	for _, e := range env {
		if text, ok := strings.CutPrefix(e, name+"="); ok {
			return text
		}
	}
	return ""
}
