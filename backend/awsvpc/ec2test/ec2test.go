// SPDX-License-Identifier: Apache-2.0

// Package ec2test is a server for tests. It speaks EC2's Query API, and IMDSv2, the protocol of the
// metadata service. It verifies the signature of each call.
//
//   - ec2test.go is the part of the state that other clouds do not have.
//   - api.go answers calls. metadata.go is the metadata service.
package ec2test

import (
	"net/netip"
	"strings"
	"sync"

	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/schema"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
)

// Server is the cloud. It is an http.Handler for calls, and safe for concurrent use. An instance is
// Restricted if its source/dest check is on.
type Server struct {
	*vpctest.State
	api schema.API

	mu   sync.Mutex
	tags map[string]map[string]string // by id of the table
}

// New returns a Server with a table and no instances.
func New() *Server {
	return &Server{
		State: vpctest.New(Interface, "CreateRoute", "ReplaceRoute", "DeleteRoute", "ModifyNetworkInterfaceAttribute"),
		api:   schema.Load("ec2"),
		tags:  map[string]map[string]string{},
	}
}

// Interface returns the id of the network interface of an instance.
func Interface(i vpctest.Instance) string { return "eni" + strings.TrimPrefix(i.ID, "i") }

// AddTagged adds a table with tags. No subnet uses it.
func (s *Server) AddTagged(id string, tags map[string]string) {
	s.mu.Lock()
	s.tags[id] = tags
	s.mu.Unlock()
	s.AddTable(id, "")
}

// tag returns the value of a tag of a table, or an empty text if the table does not have the tag.
func (s *Server) tag(table, name string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tags[table][name]
}

// AddInstance adds the instance with the number n to a subnet, and returns it. Its source/dest
// check is on.
func (s *Server) AddInstance(n int, subnet string, addresses ...netip.Addr) vpctest.Instance {
	i := s.State.AddInstance(n, subnet, addresses...)
	s.Restrict(i.ID, true)
	return s.Instance(i.ID)
}
