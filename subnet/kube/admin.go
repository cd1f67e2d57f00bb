package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"flanneld/pkg/version"
	"flanneld/subnet"
)

// Entry is one Node as an operator looks at it.
type Entry struct {
	Lease subnet.Lease
	Err   error // why it is no lease; the Lease has a Key alone then
}

// Entries lists the leases of all Nodes that flannel manages, by name of the Node.
// Of cfg it needs what says how to reach the API server, and the annotation prefix.
func Entries(ctx context.Context, cfg Config) ([]Entry, error) {
	p, err := AnnotationPrefix(cmp.Or(cfg.AnnotationPrefix, DefaultAnnotationPrefix))
	if err != nil {
		return nil, fmt.Errorf("annotation prefix %q: %w", cfg.AnnotationPrefix, err)
	}
	rc, err := restConfig(cfg.APIURL, cfg.Kubeconfig)
	if err != nil {
		return nil, err
	}
	c, err := newClient(rc, "flannelctl/"+version.Version)
	if err != nil {
		return nil, err
	}
	defer c.renew()
	d := &decoder{newKeys(p)}
	v := &view{keys: &d.keys, entries: map[string]*entry{}}
	_, err = c.list(ctx, d, query{}, func(o *object) error {
		v.take(o, true, &view{})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	var all []Entry
	for _, e := range v.entries {
		switch {
		case e.good:
			all = append(all, Entry{Lease: e.lease})
		case e.notes[managed].text == "true" && e.cidrs == nil:
			all = append(all, Entry{subnet.Lease{Key: e.name}, errNoPodCIDR})
		case !errors.Is(e.err, errNotManaged):
			all = append(all, Entry{subnet.Lease{Key: e.name}, e.err})
		}
	}
	slices.SortFunc(all, func(a, b Entry) int { return cmp.Compare(a.Lease.Key, b.Lease.Key) })
	return all, nil
}
