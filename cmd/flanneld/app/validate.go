package app

import (
	"flanneld/backend"
	"flanneld/backend/extension"
	"flanneld/backend/udp"
	"flanneld/pkg/underlay"
	"flanneld/subnet"
)

// usualMTU is what most external interfaces have, in bytes.
const usualMTU = 1500

// ValidateConfig says whether a daemon would take the network configuration:
// the error is the one that it would log. A host whose interface has an unusual
// MTU may see it otherwise. Warnings are one line each. pools says whether
// subnets have to be handed out of the networks, as with etcd; the Kubernetes API
// does that itself.
func ValidateConfig(text []byte, pools bool) (cfg subnet.Config, warnings []string, err error) {
	if cfg, warnings, err = subnet.ParseConfig(text); err != nil {
		return cfg, nil, err
	}
	if _, err := cfg.Pools(); pools && err != nil {
		return cfg, nil, err
	}
	registry, err := backends(extension.NewHost(extension.Settings{Allow: true}), udp.NewHost(udp.Settings{})) // it is for each host to say no
	if err != nil {
		return cfg, nil, err
	}
	_, more, err := registry.New(backend.Env{Config: cfg, Underlay: underlay.Interface{Name: "any", MTU: usualMTU}})
	if err != nil {
		return cfg, nil, err
	}
	return cfg, append(warnings, more...), nil
}
