// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/flanneld/flanneld/pkg/base/subnetfile"
)

// Defaults of the configuration.
const (
	defaultSubnetFile = "/run/flannel/subnet.env"
	defaultDataDir    = "/var/lib/cni/flannel"
	defaultDelegate   = "bridge"
	defaultIPAM       = "host-local"
)

// self is the name by which runtimes find this plugin.
const self = "flannel"

// object is a JSON object of which the plugin interprets only some keys.
type object map[string]json.RawMessage

// config is the plugin's configuration, as the runtime passes it.
type config struct {
	CNIVersion    string          `json:"cniVersion"`
	Name          string          `json:"name"`
	SubnetFile    string          `json:"subnetFile"`
	DataDir       string          `json:"dataDir"`
	IPAM          object          `json:"ipam"`
	Delegate      object          `json:"delegate"`
	RuntimeConfig json.RawMessage `json:"runtimeConfig"`
	PrevResult    json.RawMessage `json:"prevResult"`
	// Attachments lists the attachments that GC must keep.
	Attachments json.RawMessage `json:"cni.dev/valid-attachments"`
}

func parseConfig(stdin []byte) (config, error) {
	var c config
	if err := json.Unmarshal(stdin, &c); err != nil {
		return c, types.NewError(types.ErrDecodingFailure, "parse network configuration", err.Error())
	}

	c.SubnetFile = cmp.Or(c.SubnetFile, defaultSubnetFile)
	c.DataDir = cmp.Or(c.DataDir, defaultDataDir)
	return c, nil
}

// check is not for deleting, because the note contains the configuration for that.
func (c config) check() error {
	for _, key := range []string{"name", "ipam"} {
		if _, ok := c.Delegate[key]; ok {
			return fmt.Errorf("delegate.%s is not allowed: the plugin sets it", key)
		}
	}

	t, err := c.Delegate.text("type", defaultDelegate)
	if err != nil {
		return fmt.Errorf("delegate.%w", err)
	}
	if t == self {
		return fmt.Errorf("delegate.type is %q: want another plugin", t)
	}

	if _, err := c.IPAM.text("type", defaultIPAM); err != nil {
		return fmt.Errorf("ipam.%w", err)
	}
	return nil
}

// text returns the string under key, or def if there is no such key. An empty string is an error.
func (o object) text(key, def string) (string, error) {
	raw, ok := o[key]
	if !ok {
		return def, nil
	}
	var s string
	if err := json.Unmarshal(raw, &s); err != nil || s == "" {
		return "", fmt.Errorf("%s is %s: want a string", key, raw)
	}
	return s, nil
}

func (o object) set(key string, value any) { o[key] = raw(value) }

// raw returns the JSON of a value that the plugin sets or has parsed, each of which has one.
func raw(value any) json.RawMessage {
	text, _ := json.Marshal(value)
	return text
}

// preset is set unless the object has the key.
func (o object) preset(key string, value any) {
	if _, ok := o[key]; !ok {
		o.set(key, value)
	}
}

func (o object) clone() object {
	c := object{} // maps.Clone would return nil for nil, and nil cannot be changed
	maps.Copy(c, o)
	return c
}

// delegation returns the configuration with which the delegate adds a container on this host. The
// error has the code ErrTryAgainLater if flanneld has not written a valid subnet file.
func (c config) delegation() (object, error) {
	if err := c.check(); err != nil {
		return nil, types.NewError(types.ErrInvalidNetworkConfig, "network configuration "+c.Name, err.Error())
	}

	host, err := subnetfile.Load(c.SubnetFile)
	if err != nil {
		details := err.Error()
		if errors.Is(err, fs.ErrNotExist) {
			details += ": flanneld has not written it yet"
		}
		return nil, types.NewError(types.ErrTryAgainLater, "the host has no subnet", details)
	}
	return c.delegationOn(host)
}

// release returns a configuration with which the delegate can delete an attachment whose note is
// damaged.
func (c config) release() (object, error) {
	host, err := subnetfile.Load(c.SubnetFile)
	if err != nil {
		// After a boot flanneld may not have written the file yet. Any range will do, because
		// host-local requires one, but releases the container's addresses of all ranges. This
		// one is reserved for documentation (RFC 5737).
		none := netip.MustParsePrefix("192.0.2.0/24")
		host = subnetfile.File{Entries: []subnetfile.Entry{{Network: none, Subnet: none}}}
	}

	c.IPAM = c.IPAM.clone()
	delete(c.IPAM, "routes") // deleting needs no routes, so bad ones must not make it fail
	return c.delegationOn(host)
}

func (c config) delegationOn(host subnetfile.File) (object, error) {
	ipam, err := c.addressManagement(host)
	if err != nil {
		return nil, err
	}

	d := c.Delegate.clone()
	d.set("name", c.Name)
	d.preset("type", defaultDelegate)
	d.preset("mtu", host.MTU)
	d.preset("ipMasq", !host.IPMasq) // either flanneld or the delegate masquerades
	if t, _ := d.text("type", ""); t == defaultDelegate {
		d.preset("isGateway", true)
	}
	d.set("ipam", ipam)
	c.runtime(d)
	return d, nil
}

// runtime sets in d what the runtime passes with each call. The CNI version may differ from that of
// ADD, if the runtime or the plugins were upgraded in between.
func (c config) runtime(d object) {
	if c.CNIVersion != "" {
		d.set("cniVersion", c.CNIVersion)
	}
	if c.RuntimeConfig != nil {
		d.set("runtimeConfig", c.RuntimeConfig)
	}
}

// addressManagement returns the operator's ipam object with ranges from the host's subnets, and with
// routes to their networks.
func (c config) addressManagement(host subnetfile.File) (object, error) {
	ipam := c.IPAM.clone()
	ipam.preset("type", defaultIPAM)

	var routes []json.RawMessage
	if given, ok := ipam["routes"]; ok {
		if err := json.Unmarshal(given, &routes); err != nil {
			return nil, types.NewError(types.ErrInvalidNetworkConfig, "network configuration "+c.Name, "ipam.routes: "+err.Error())
		}
	}

	var ranges [][]object
	for _, e := range host.Entries {
		ranges = append(ranges, []object{{"subnet": raw(e.Subnet)}})
		routes = append(routes, raw(object{"dst": raw(e.Network)}))
	}

	ipam.set("ranges", ranges)
	ipam.set("routes", routes)
	return ipam, nil
}
